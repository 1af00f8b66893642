# compiled.py takes the functions by name; those in Python have their types.
