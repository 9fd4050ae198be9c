"""From the text of an answer to an option letter or a time window: one extractor for rewards and evaluation.

Both functions take the body of an answer (no tags), never raise, and return None rather than guess.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Of options."""
_CONTEXT = 48
"""Characters beside a letter or an option's text that decide how it is meant; bounds the work per match."""

# A letter is a token of its own: not part of a word, a contraction, a hyphenated word or a number.
_TOKEN = re.compile(r"(?<![a-z0-9-])(?<![a-z0-9][_'’])[a-z](?![a-z0-9]|[-._'’][a-z0-9])", re.IGNORECASE)
_OPEN = r"[\s*_`\"'(\[{]*"
_CLOSE = r"[*_`\"')\]}.:]*"
_NAMED = r"(?:(?:option|choice|letter) )?"
_HEDGE = r"(?:(?:most likely|probably|likely|definitely|clearly|therefore|thus|either) )?(?:the )?"
_LEAD = re.compile(
    r"(?:(?:\banswer|\b(?:correct|right|best|final|my) (?:option|choice|one|letter))[*_`\"']* ?"
    r"(?:(?:is|was|would be|will be|should be|must be|could be|might be)\b ?:?|[:=]|->?|[–—→]|(?=[a-z(*]))"
    r"|\b(?:I|I['’]d|I['’]ll|we|would|will) (?:choose|chose|pick|select|go with|going with)\b"
    rf"|\\boxed\{{(?:\\text\{{)?){_OPEN}{_HEDGE}{_NAMED}{_OPEN}",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    rf"{_CLOSE} is (?:the |also |most )*(?:correct|answer|(?:right|best) (?:answer|option|choice|one))\b", re.IGNORECASE
)
_REJECTED = re.compile(
    rf"{_CLOSE} (?:(?:is|was|(?P<all>are|were)|seems?|looks?|can be|must be) )?"
    r"(?:not|isn['’]t|wasn['’]t|(?P<all_not>aren['’]t)|cannot|can['’]t|wrong|incorrect|false|eliminated|ruled out"
    r"|excluded|impossible)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"(?:\bnot|n['’]t|\bcannot be|\bnever|\bneither|\bnor|\bthan|\bexcept|\beliminate|\bexclude|\brule out|\bruled out)"
    rf" (?:be )?(?:the )?{_NAMED}{_OPEN}$",
    re.IGNORECASE,
)
_LISTED = re.compile(rf"{_CLOSE}(?:,? (?:and|or|nor) |[/&]){_NAMED}{_OPEN}", re.IGNORECASE)
_JOINED = re.compile(r"(?:[\s*_`\"'(\[{)\]},;/&+]|\b(?:or|and|maybe|perhaps|possibly|even|option)\b)*", re.IGNORECASE)
# Words that follow the letter A but hardly ever the article.
_AFTER_A = re.compile(
    r" (?:because|since|as|which|that|and|or|but|not|is|isn['’]t|was|due|based|given|over|rather|instead|while|so"
    r"|though|although|however|if|seems|would|matches|fits|[b-z])\b",
    re.IGNORECASE,
)
_LABELLED = re.compile(r"(?:\b(?:option|choice|letter) |[(\[{*])$", re.IGNORECASE)
_CUE = re.compile(
    rf"(?:\b(?:so|is|be|choose|pick|select|answer|therefore|thus|hence|with)\b|[:=,]){_OPEN}$", re.IGNORECASE
)
_AT_START = re.compile(rf"{_OPEN}{_NAMED}{_OPEN}", re.IGNORECASE)
_DELIMITED = re.compile(r"$|[.):,;*\]}\"'`_/&+!]| ?[-–—]|\?$")
_AT_END = re.compile(r"[\s.!?:;,*_`\"')\]}]*$")
_TEXT_NEGATED = re.compile(r"(?:\bnot|n['’]t) (?:(?:a|an|the|be) )?$")


@dataclass(frozen=True)
class _Letter:
    """A letter that is meant as one, and where it stands."""

    letter: str
    start: int
    end: int
    explicit: bool
    """Confirmed by what follows it ("B is correct")."""
    delimited: bool


def extract_letter(text: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer names, or None if it names none or more than one.

    options: the texts of the options, with or without their own "A. " labels; letters run from A to at most Z.
    Tried in this order: the whole text of exactly one option (unless that is a single character); the last explicit
    phrase ("the answer is B", "C is correct", also with an option's text for the letter); a leading label; a
    concluding letter; the text of exactly one option (of texts that contain one another, the longest); exactly one
    letter. An explicit or leading letter beyond the options is no answer, and neither are letters named together
    ("A or B") or rejected ("not A", "A is wrong"). Small letters count where they can't be words.
    """
    text = _tidy(text)
    texts = _option_texts(options)
    if not text or not texts:
        return None
    valid = [_name(n) for n in range(len(texts))]
    whole = _plain(text)
    same = [n for n, option in enumerate(texts) if option == whole]
    if len(same) == 1 and len(whole) > 1:
        return valid[same[0]]
    letters = _letters(text, len(texts))
    shared = _named_together(text, letters)
    for decide in (_last_phrase, _leading):
        decided = decide(text, letters, texts)
        if decided is not None:
            return decided.letter if decided.letter in valid and decided not in shared else None
    if letters and letters[-1].letter in valid and _AT_END.match(text, letters[-1].end):
        return None if letters[-1] in shared else letters[-1].letter
    within = _options_within(whole, texts)
    if len(within) == 1:
        return valid[within[0]]
    distinct = {letter.letter for letter in letters} & set(valid)
    return distinct.pop() if len(distinct) == 1 and not shared else None


def _name(index: int) -> str:
    return chr(ord("A") + index)


def option_label(letter: str) -> re.Pattern[str]:
    """The label "A. ", "(A) ", "A: " that an option may carry; it matches at the start."""
    return re.compile(rf"\A\s*\(?{letter}[.):](?:\s+|$)", re.IGNORECASE)


def _tidy(text: str) -> str:
    """One line of ordinary characters: full-width letters, odd spaces and line breaks are only typography."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _plain(text: str) -> str:
    """For comparing texts: no case, no emphasis, no punctuation at the edges."""
    return _tidy(text).casefold().replace("*", "").strip(" .,;:!?\"'`()[]{}")


def _option_texts(options: Sequence[str]) -> list[str]:
    """Option texts to compare with, without the labels they may carry (once or several times)."""
    out = []
    for n, option in enumerate(options[: len(LETTERS)]):
        label = re.compile(rf"\(?{_name(n)}[.):]\s*(?=\S)", re.IGNORECASE)
        option = _tidy(option)
        start = 0
        while match := label.match(option, start):
            start = match.end()
        out.append(_plain(option[start:]))
    return out


def _letters(text: str, count: int) -> list[_Letter]:
    """The letters that are meant as such and aren't rejected, in order, also those beyond the options."""
    out: list[_Letter] = []
    negated_to = len(text)  # where the last letter after a "not" ends
    for match in _TOKEN.finditer(text):
        before = text[max(0, match.start() - _CONTEXT) : match.start()]
        after = text[match.end() : match.end() + _CONTEXT]
        delimited = _DELIMITED.match(after) is not None
        if not _is_meant(match, before, after, count, delimited):
            continue
        listed = 0 < match.start() - negated_to <= _CONTEXT and _LISTED.fullmatch(text, negated_to, match.start())
        if _NEGATION.search(before) or listed:
            negated_to = match.end()
        elif rejected := _REJECTED.match(after):
            start = match.start()
            while (rejected["all"] or rejected["all_not"]) and out and _LISTED.fullmatch(text, out[-1].end, start):
                start = out.pop().start
        else:
            explicit = _CONFIRMED.match(after) is not None
            out.append(_Letter(match[0].upper(), match.start(), match.end(), explicit, delimited))
    return out


def _is_meant(match: re.Match[str], before: str, after: str, count: int, delimited: bool) -> bool:
    """Whether a letter is a label rather than a word or a part of one."""
    labelled = _LABELLED.search(before) is not None
    if match[0] in "iI":  # the pronoun, unless there are that many options and it is set apart
        meant = count > 8 and delimited and (labelled or not after.startswith(","))
    elif match[0] in "aA":  # the article, unless it is set apart or what follows can't belong to one
        meant = labelled or delimited or _AFTER_A.match(after) is not None
    else:
        meant = True
    if match[0].isupper():
        return meant
    first = match.start() <= _CONTEXT and _AT_START.fullmatch(before) is not None
    return meant and (labelled or first or (delimited and _CUE.search(before) is not None))


def _named_together(text: str, letters: Sequence[_Letter]) -> set[_Letter]:
    """Letters with nothing but "or", "and", commas and the like between them and another one."""
    out: set[_Letter] = set()
    for one, other in pairwise(letters):
        if one.letter != other.letter and _JOINED.fullmatch(text, one.end, other.start):
            out |= {one, other}
    return out


def _last_phrase(text: str, letters: Sequence[_Letter], texts: Sequence[str]) -> _Letter | None:
    """The letter of the last explicit phrase; one that is followed by an option's text names that option."""
    at = {letter.start: letter for letter in letters}
    found = [letter for letter in letters if letter.explicit]
    longest = 2 * max(map(len, texts)) + _CONTEXT
    for lead in _LEAD.finditer(text):
        if lead.end() in at:
            found.append(at[lead.end()])
            continue
        rest = _plain(text[lead.end() : lead.end() + longest])
        named = [n for n, option in enumerate(texts) if option and next(_occurrences(option, rest), None) == 0]
        best = max((len(texts[n]) for n in named), default=0)
        named = [n for n in named if len(texts[n]) == best]
        if len(named) == 1:
            found.append(_Letter(_name(named[0]), lead.end(), lead.end(), True, True))
    return max(found, key=lambda letter: letter.start, default=None)


def _leading(text: str, letters: Sequence[_Letter], texts: Sequence[str]) -> _Letter | None:
    """A label at the start. One beyond the options only counts if it is set apart ("E." but not "U turn")."""
    if not letters or letters[0].start > _CONTEXT or not _AT_START.fullmatch(text, 0, letters[0].start):
        return None
    valid = letters[0].delimited or ord(letters[0].letter) - ord("A") < len(texts)
    return letters[0] if valid else None


def _occurrences(option: str, text: str) -> Iterator[int]:
    """Where an option's text stands in a text as whole words and isn't negated. Both are plain."""
    start = text.find(option)
    while start >= 0:
        end = start + len(option)
        before, after = text[max(0, start - _CONTEXT) : start], text[end : end + 2]
        cut = (
            (_wordy(option[:1]) and _wordy(before[-1:]))
            or (_wordy(option[-1:]) and _wordy(after[:1]))
            or (option[0].isdigit() and re.search(r"\d[.,:]$", before))
            or (option[-1].isdigit() and re.match(r"[.,:]\d", after))
        )
        if not cut and not _TEXT_NEGATED.search(before):
            yield start
        start = text.find(option, end)


def _wordy(char: str) -> bool:
    """Letters and digits of scripts that put spaces between words."""
    return char.isalnum() and ord(char) < 0x2E80


def _options_within(text: str, texts: Sequence[str]) -> list[int]:
    """The options whose text is in `text` other than as a part of a longer option's text there."""
    found: set[str] = set()
    for option in sorted({option for option in texts if option}, key=len, reverse=True):
        parts = []
        end = 0
        for start in _occurrences(option, text):
            parts += [text[end:start], "\0" * len(option)]
            end = start + len(option)
        if parts:
            found.add(option)
            text = "".join([*parts, text[end:]])
    return [n for n, option in enumerate(texts) if option in found]


# A time is a clock (h:mm:ss or m:ss), minutes and seconds in words, or a number with or without a unit.
_NUM = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_S = r"s(?:ec(?:ond)?s?)?"
_M = r"m(?:in(?:ute)?s?)?"


def _time(n: int) -> str:
    return (
        rf"(?:(?:(?P<h{n}>[0-9]+):)?(?P<m{n}>[0-9]+):(?P<s{n}>[0-9]{{1,2}}(?:\.[0-9]+|,[0-9]{{3}}(?![0-9:]))?)"
        rf"|(?P<wm{n}>[0-9]+)\s?{_M}(?:\s?and)?\s?(?P<ws{n}>{_NUM})(?=\s?{_S}\b)"
        rf"|(?P<x{n}>{_NUM}))(?:\s?(?:(?P<us{n}>{_S})|(?P<um{n}>{_M}))\b\.?)?"
    )


_FILL = r"(?:(?:the|second|seconds|about|around|approximately|at|time|roughly)\s)*"
_START = r"(?<![\w.:,/])"
_STOP = r"(?![\w%]|[.,:/][0-9]|\s?[-–—−/]\s?[0-9])"
_RANGE = re.compile(
    rf"(?={_START}{_time(1)}"
    r"[>)\]]?(?P<sep>\s?(?:-->|->|[-–—−~～→])\s?|\s?[,;]\s|[,;]|,?\s(?:to|until|till|through|and)\s)"
    rf"{_FILL}[<(\[]?{_time(2)}{_STOP})",
    re.IGNORECASE,
)
_FIELDS = re.compile(
    rf"\b(?:start|begin)[a-z_]{{0,12}}[^0-9\n.!?-]{{0,24}}{_time(1)}[^0-9!?-]{{1,40}}?"
    rf"\b(?:end|stop|finish)[a-z_]{{0,12}}[^0-9\n.!?-]{{0,24}}{_time(2)}{_STOP}",
    re.IGNORECASE,
)
_TWO_NUMBERS = re.compile(rf"[\[(]?{_time(1)}\s{_time(2)}[\])]?\.?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[!?\n]|\.(?=\s)")
_ANSWER_WORD = re.compile(r"\banswer\b|\bfinal\b", re.IGNORECASE)
_BETWEEN = re.compile(rf"\bbetween {_FILL}$", re.IGNORECASE)
_SENTENCE = 200
"""How far back (characters) a sentence may introduce a pair."""
_EVENT_WORD = re.compile(r"\b(?:happen|occur|tak(?:e|es|ing) place|took place)", re.IGNORECASE)


def extract_window(text: str) -> tuple[float, float] | None:
    """The time window of a temporal answer: (start, end) in seconds, start < end; None if there is none.

    Understands "24.3 - 30.4", "[12, 19]", "from 12 to 19.5", "between 5 and 9 seconds", "0:12 to 0:19.5",
    "1:00:05 - 1:00:09", "12s–19s", "1 min 5 s to 1 min 20 s", "starts at 12 and ends at 19". A reversed pair is
    swapped; negative times, a single number and an empty window are none. Of several pairs, one after "answer" in
    its sentence comes first, then one after "happens", then one with a unit or a clock, then the kind of separator,
    then the earliest.
    """
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", text).strip()
    ranges = (match for match in _RANGE.finditer(text) if not _is_stray(text, match))
    found = [(_rank(text, match), match) for match in (*_FIELDS.finditer(text), *ranges)]
    for _, match in sorted(found, key=lambda item: item[0]):
        if (window := _window(match)) is not None:
            return window
    only = _TWO_NUMBERS.fullmatch(text)
    return None if only is None else _window(only)


def _is_stray(text: str, match: re.Match[str]) -> bool:
    """A pair that isn't one: its first number has a minus sign, or "and" just counts two things."""
    before = text[max(0, match.start() - _CONTEXT) : match.start()]
    joined_by_and = match["sep"].strip(" \n,").lower() == "and"
    return before.endswith(("-", "−")) or (joined_by_and and not _has_unit(match) and not _BETWEEN.search(before))


def _has_unit(match: re.Match[str]) -> bool:
    return any(match[name] is not None for name in ("m1", "m2", "us1", "us2", "um1", "um2", "wm1", "wm2"))


def _rank(text: str, match: re.Match[str]) -> tuple[int, int]:
    """Sort key of a pair: the better it is introduced, the smaller; then by position."""
    before = text[max(0, match.start() - _SENTENCE) : match.start()]
    sentence = _SENTENCE_END.split(before)[-1]
    separator = match.groupdict().get("sep")
    points = 8 if _ANSWER_WORD.search(sentence) else 0
    points += 4 if _EVENT_WORD.search(sentence) else 0
    points += 2 if _has_unit(match) or separator is None else 0
    points += 1 if separator is None or separator.strip() not in (",", ";", "and", ", and") else 0
    return -points, match.start()


def _window(match: re.Match[str]) -> tuple[float, float] | None:
    in_minutes = match["um2"] is not None
    times = sorted((_seconds(match, 1, in_minutes), _seconds(match, 2, in_minutes)))
    return (times[0], times[1]) if times[0] < times[1] < math.inf else None


def _seconds(match: re.Match[str], n: int, in_minutes: bool) -> float:
    """The n-th time of a pair; a number without a unit takes the minutes of "5 to 9 minutes"."""
    if match[f"m{n}"] is not None:
        clock = (match[f"h{n}"] or "0", match[f"m{n}"], match[f"s{n}"].replace(",", "."))
        return 3600 * float(clock[0]) + 60 * float(clock[1]) + float(clock[2])
    if match[f"wm{n}"] is not None:
        return 60 * float(match[f"wm{n}"]) + float(match[f"ws{n}"])
    minutes = match[f"um{n}"] is not None or (in_minutes and match[f"us{n}"] is None)
    return float(match[f"x{n}"]) * (60 if minutes else 1)
