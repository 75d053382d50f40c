"""What stands around the texts that a run's model reads."""

from typing import NamedTuple

from weft.data.batch import Frame, filler
from weft.data.prepare import VERSION
from weft.recipe.config import Recipe
from weft.runs.folder import RunFolder
from weft.runs.lines import read_lines
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
    if not trained_here(recipe):
        return TextFrame(before, after)
    if tokenizer.opens:
        return TextFrame(before)
    eos = None if recipe.data.document_mask else tokenizer.eos_id
    return TextFrame(precede=() if eos is None else (eos,))


def sentence_frame(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> Frame:
    """How a run's model reads a text, or two, of which it predicts something.

    As the model's own tokenizer frames them, also where another model's weights were trained further here. Where that
    says nothing, [CLS] and [SEP] do it, or eos, from which a decoder can tell that all has been read.
    """
    if tokenizer.frames and not began_early(folder) and (any(tokenizer.frame) or not trained_here(recipe)):
        return Frame.of(tokenizer)
    return Frame.usual(tokenizer)


def source_frame(recipe: Recipe, folder: RunFolder, tokenizer: Tokenizer) -> Frame:
    """How an encoder–decoder reads its source: the text and eos, unless its tokenizer has it otherwise.

    What is trained here can tell by eos where the source ends, whatever its tokenizer was made for.
    """
    before, after = tokenizer.frame
    ends = tokenizer.eos_id in after and not began_early(folder)
    if tokenizer.frames and (ends if trained_here(recipe) else True):
        return Frame(before, (), after, filler(tokenizer))
    return Frame((), (), (tokenizer.need("eos"),), filler(tokenizer))


def trained_here(recipe: Recipe) -> bool:
    """Whether a run's model learned here, rather than being imported."""
    return recipe.steps is not None or bool(recipe.data.parts)


def began_early(folder: RunFolder) -> bool:
    """Whether a run began with weft 0.1, which cut and framed texts in its own way, and noted none."""
    starts = [event for event in read_lines(folder.events) if event["event"] == "start"]
    return bool(starts) and starts[0].get("data_version", 1) < VERSION
