"""The bundled family, trained on the source of Python's standard library; `python -m recipes.stdlib` makes it."""
