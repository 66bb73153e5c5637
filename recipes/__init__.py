"""Recipes: how the models that ship with forerun were made, as commands that make them again."""
