"""Recipes: commands that make the models and drafters that ship with forerun."""
