"""What transformers loads for `custom_generate=FOLDER`: it copies the file, and looks for this name in it."""

from forerun.inside.transformers import generate_in_folder as generate

__all__ = ["generate"]
