LAYOUT: str  # spinning.py says what the functions do, and has their types
