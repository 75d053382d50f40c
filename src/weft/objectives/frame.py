"""What stands around a text that a language model reads."""

from typing import NamedTuple

from weft.recipe.config import Recipe
from weft.text.tokenizer import Tokenizer

Ids = tuple[int, ...]


class TextFrame(NamedTuple):
    """Ids around every text: `before` it and `after` it; and those that `precede` the first, the end of another text.

    What is before a text, or precedes it, is given and not predicted; what its own tokenizer puts after it is predicted
    as the text is.
    """

    before: Ids = ()
    after: Ids = ()
    precede: Ids = ()

    @property
    def begins(self) -> Ids:
        """All that a text is read after."""
        return self.precede + self.before


def text_frame(recipe: Recipe, tokenizer: Tokenizer) -> TextFrame:
    """How a run's model reads a text.

    An imported model reads what its own tokenizer makes of one, as its makers have it: LLaMA's begins with bos, GPT-2's
    with the text itself, whose first token then nothing predicts. A model that was trained here has seen bos where its
    tokenizer puts it before a text, or else the end of the text before, unless documents don't see each other.
    """
    before, after = tokenizer.frame
    if recipe.steps is None and not recipe.data.parts:  # it was not trained here
        return TextFrame(before, after)
    if tokenizer.opens:
        return TextFrame(before)
    eos = None if recipe.data.document_mask else tokenizer.eos_id
    return TextFrame(precede=() if eos is None else (eos,))
