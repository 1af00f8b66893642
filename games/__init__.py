"""Games in processes of their own: started on leased ports, watched, ended and renewed."""

__all__: list[str] = []
