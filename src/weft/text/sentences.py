"""Rule-based sentence splitting: no model, no download, and no text is lost.

A sentence ends after a stop and the closing quotes and brackets that follow it. Many full stops don't end a sentence,
so the words before and after a stop decide if whitespace follows it.
"""

import re
import tomllib
from pathlib import Path

_FILE = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))
# words before and after a stop
TITLES, COUNTED, EITHER, OPENERS = (frozenset(words.split()) for words in _FILE.values())
CLOSERS = "\"'”’»›)]}」』）】》〉"
CLOSING = rf"[{re.escape(CLOSERS)}]"
# scripts without spaces between words; after a quotation, と and って continue the sentence
WIDE = (
    rf"(?<![。！？｡．])(?:[。！？｡]|．(?!\d))[。！？｡．…!?]*+(?:{CLOSING}++(?!と|って|[、，,;；:：。]))?(?!{CLOSING})"
)
# [3] is a footnote, which encyclopedias put after a stop
SPACED = rf"(?<![.!?…‥])[.!?…‥؟۔।॥։።]++(?:{CLOSING}|\[\d+\])*+(?=\s|$)"
BLANK = r"\n[^\S\n]*+\n"
STOP = re.compile(rf"(?:(?P<spaced>{SPACED})|{WIDE}|{BLANK})(?P<space>\s*+)")
LAST_WORD = re.compile(r"[^\s(\[\"“‘«—–]*$")
NEXT = re.compile(r"[\"'“”‘«‹(\[{¿¡—–-]*\s*([^\W_]*)")
INITIALS = re.compile(r"[^\W\d_]|[^\W\d_]{1,2}(?:\.[^\W\d_]{1,2})+")  # J, U.S, e.g, Ph.D
LOOK_BACK = 40  # characters before a stop; a longer word is no abbreviation


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, whose concatenation is the text: whitespace belongs to the sentence before it.

    A blank line always ends a sentence, since headings and verses have no stop.
    """
    cased = text != text.lower()
    sentences = []
    start = 0
    for stop in STOP.finditer(text):
        if stop["spaced"] is None or _ends(text, stop, cased):
            sentences.append(text[start : stop.end()])
            start = stop.end()
    if start < len(text):
        sentences.append(text[start:])
    if len(sentences) > 1 and sentences[0].isspace():
        sentences[:2] = [sentences[0] + sentences[1]]
    return sentences


def _ends(text: str, stop: re.Match[str], cased: bool) -> bool:
    following = NEXT.match(text, stop.end())
    assert following is not None
    word = following[1]
    if re.search(BLANK, stop["space"]):
        return True
    if cased and word[:1].islower():  # “Really?” he asked. Wait … no.
        return False
    if stop["spaced"].rstrip(CLOSERS) != ".":
        return True
    # a single full stop between two words
    start = stop.start()
    before = LAST_WORD.search(text, max(0, start - LOOK_BACK), start)
    assert before is not None
    name, earlier = before[0].casefold(), text[max(0, before.start() - LOOK_BACK) : before.start()]
    if name in TITLES:
        return False
    if name in COUNTED:
        return not word[:1].isdigit()
    if name.isdigit():  # the number of a list's item
        return earlier.rpartition("\n")[2].strip() != ""
    if before[0] == "I":  # the pronoun in “so do I. Then”, not an initial
        last = (earlier.split() or [""])[-1]
        return last.isalpha() and last.islower()
    return word.casefold() in OPENERS or not word or not (name in EITHER or INITIALS.fullmatch(name))
