"""Text cut into sentences by rules: no model, no download, and nothing lost.

A sentence ends after a stop, with the quotes and brackets that close behind it. Most full stops in a text mean
something else, so a stop that white space follows is weighed by the word before it and the word after it.
"""

import re

# ---- the words around a stop


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# always in front of a name
TITLES = _set(
    "mr mrs ms dr prof st mt gen col maj capt cmdr lt sgt rev hon pres gov sen rep amb messrs mme mlle vs cf viz "
    "approx bzw ggf inkl evtl sog vgl"
)
# in front of a number, and an ordinary word elsewhere
COUNTED = _set("no nos nr fig figs eq eqs sec ch vol vols art pp p pt ref tab")
# in the middle of a sentence or at its end: the next word decides
EITHER = _set(
    "al inc ltd co corp bros jr sr dept univ assn ave blvd jan feb apr jun jul aug sep sept oct nov dec tue thu"
)
# words that a sentence begins with, and that are part of no name
OPENERS = _set(
    "a after all although an and are as at because before both but by can did do does during each even every few for "
    "from had has have he her here his how however i if in indeed is it its just last later many maybe more most my "
    "nearly never next nobody not nothing now of on once one only or other our perhaps she should since so some soon "
    "still such that the their then there these they this those though thus to today two under until was we were what "
    "when where whether which while who whose why with without yes yet you your"
)

CLOSERS = "\"'”’»›)]}」』）】》〉"
CLOSING = rf"[{re.escape(CLOSERS)}]"
# without spaces between words, a stop needs none behind it; と and って go on after what was quoted
WIDE = (
    rf"(?<![。！？｡．])(?:[。！？｡]|．(?!\d))[。！？｡．…!?]*+(?:{CLOSING}++(?!と|って|[、，,;；:：。]))?(?!{CLOSING})"
)
# [3] is a footnote's mark, as encyclopedias have them behind a stop
SPACED = rf"(?<![.!?…‥])[.!?…‥؟۔।॥։።]++(?:{CLOSING}|\[\d+\])*+(?=\s|$)"
BLANK = r"\n[^\S\n]*+\n"
STOP = re.compile(rf"(?:(?P<spaced>{SPACED})|{WIDE}|{BLANK})(?P<space>\s*+)")
LAST_WORD = re.compile(r"[^\s(\[\"“‘«—–]*$")
NEXT = re.compile(r"[\"'“”‘«‹(\[{¿¡—–-]*\s*([^\W_]*)")
INITIALS = re.compile(r"[^\W\d_]|[^\W\d_]{1,2}(?:\.[^\W\d_]{1,2})+")  # J, U.S, e.g, Ph.D
LOOK_BACK = 40  # characters; a longer word is no abbreviation


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order. Put together they are the text: white space stays with the sentence before.

    A blank line ends a sentence too, whatever comes before it: headings and verses have no stop.
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
    """Does this stop, with white space behind it, end a sentence?"""
    following = NEXT.match(text, stop.end())
    assert following is not None
    word = following[1]
    if re.search(BLANK, stop["space"]):
        return True
    if cased and word[:1].islower():  # “Really?” he asked. Wait … no.
        return False
    if stop["spaced"].rstrip(CLOSERS) != ".":
        return True
    start = stop.start()
    before = LAST_WORD.search(text, max(0, start - LOOK_BACK), start)
    assert before is not None
    return _ends_after(text, before[0], before.start(), word)


def _ends_after(text: str, before: str, begin: int, after: str) -> bool:
    """Does a single full stop between these two words end a sentence? `begin` is where the word before it begins."""
    name = before.casefold()
    opens = after.casefold() in OPENERS
    if name in TITLES:
        return False
    if name in COUNTED:
        return not after[:1].isdigit()
    if name.isdigit():  # the number of a list's item
        return text[max(0, begin - LOOK_BACK) : begin].rpartition("\n")[2].strip() != ""
    if before == "I":  # no initial in “so do I. Then”
        earlier = text[max(0, begin - LOOK_BACK) : begin].split()
        return bool(earlier) and earlier[-1].isalpha() and earlier[-1].islower()
    return opens or not after or not (name in EITHER or INITIALS.fullmatch(name))
