"""What views say of themselves."""

from weft.figures.prose import prose

TEXTS = prose(__file__)
