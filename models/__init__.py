"""Example models, each with its layout maps, and the program that trains them."""
