"""Rewards: pure functions of an `Episode`, each a named `Score`.

    R = w_acc * R_acc + w_fmt * R_fmt + w_tool * R_tool + user rewards

What failed (decode, engine, judge) is unscored, and so is every sum that it would be paid into; what is wrong, cut off
or unreadable is the policy's own doing and scores 0.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

from paravt.answers import LETTERS, extract_letter, extract_window, option_label
from paravt.errors import ParaVTError, RecipeError
from paravt.spans import END_OF_TURN, structural_spans
from paravt.structure import FormatKind, turn_kind, turn_stops
from paravt.turns import parse_turn
from paravt.types import Episode, Sample, Score, Turn

RewardFunction: TypeAlias = Callable[[Episode], Score]


@dataclass(frozen=True)
class RewardConfig:
    """What is paid. Terms of weight 0 are computed and logged, not paid."""

    accuracy_weight: float = 1.0
    """Of the answer: right letter, overlap of windows, token F1 or the judge's grade."""
    format_weight: float = 0.0
    """Of the graded format score."""
    tool_weight: float = 0.0
    """Of the tool reward: calls that were parsed or ran, and more if the answer is right."""
    answer_suffix: bool = True
    """False: the vanilla variant of the graded format score, which has no anchor."""
    anchor_weight: float = 0.0
    """Of the anchor inside the format reward: 0 unless the anchor's credit is "sequence"."""
    call_cost: float = 0.0
    """Taken from the tool reward for each executed call."""
    functions: tuple[str, ...] = ()
    """User rewards, "module:function", each `(episode: Episode) -> Score`, paid with weight 1."""


def reward(episode: Episode, config: RewardConfig, accuracy_score: Score | None = None) -> dict[str, Score]:
    """Every term by its name: accuracy, format, tool, one for each user function, and total.

    `accuracy_score` takes the place of `accuracy` where something else (a judge) has graded the answer. The total is
    unscored if a term that is paid is. Raises RecipeError for a user function that cannot be had or gives no score.
    """
    names = ("accuracy", "format", "tool", *config.functions)
    functions = [load_function(name) for name in config.functions]
    if not episode.scored:
        return {name: _failed(episode) for name in (*names, "total")}
    right = accuracy(episode.sample, episode.answer) if accuracy_score is None else accuracy_score
    graded = format_graded(
        assistant_text(episode), answer_suffix=config.answer_suffix, anchor_weight=config.anchor_weight
    )
    terms = {
        "accuracy": right,
        "format": Score(graded, None, "graded score of the format"),
        "tool": tool_reward(episode, right, call_cost=config.call_cost),
    }
    for name, function in zip(config.functions, functions, strict=True):
        try:
            found = function(episode)
        except ParaVTError:  # says itself what it is
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RecipeError(f"reward function {name!r} failed on sample {episode.sample.id}: {said}") from error
        terms[name] = _user_score(name, found)
    weights = dict.fromkeys(names, 1.0)
    weights |= {"accuracy": config.accuracy_weight, "format": config.format_weight, "tool": config.tool_weight}
    return {**terms, "total": _total(terms, weights)}


def _total(terms: dict[str, Score], weights: dict[str, float]) -> Score:
    """Its explanation says what is paid, such as "accuracy + 0.5 tool": other terms are logged alone."""
    total = 0.0
    for name, score in terms.items():
        if weights[name] != 0:
            if score.value is None:
                return Score.unscored(f"{name}: {score.explanation}")
            total += weights[name] * score.value
    paid = [name if weights[name] == 1 else f"{weights[name]:g} {name}" for name in terms if weights[name] != 0]
    return Score(total, None, " + ".join(paid))


def _failed(episode: Episode) -> Score:
    error = next(error for error in episode.errors if not error.scored)
    return Score.unscored(f"{error.where}: {error.message}")


# ---------------------------------------------------------------------------------------------------- accuracy


def accuracy(sample: Sample, answer: str | None) -> Score:
    """How right an answer is, 0 to 1, by the type of the sample.

    choice: 1 if exactly the right letter can be extracted; temporal: intersection over union of the windows; open:
    `token_f1`. A sample whose own answer is missing or can't be used leaves the score unscored.
    """
    gold = (sample.answer or "").strip()
    if not gold:
        return Score.unscored(f"sample {sample.id} has no reference answer")
    if sample.type == "choice":
        return _choice(sample, gold, answer)
    if sample.type == "temporal":
        return _temporal(sample, gold, answer)
    if answer is None or not answer.strip():
        return Score(0.0, None, "no answer")
    return Score(token_f1(answer, gold), answer, "token F1")


def _choice(sample: Sample, gold: str, answer: str | None) -> Score:
    # without a list, the options are a part of the question's text: any of the usual letters may be meant
    options = sample.options or ("",) * max(8, ord(gold[0].upper()) - ord("A") + 1 if gold[0].isascii() else 8)
    right = gold_letter(gold, options)
    if right is None:
        return Score.unscored(f"sample {sample.id}: the reference answer {gold[:60]!r} is not one of the options")
    if answer is None or not answer.strip():
        return Score(0.0, None, "no answer")
    letter = extract_letter(answer, options)
    if letter is None:
        return Score(0.0, None, "the answer names no option, or several")
    return Score(float(letter == right), letter, f"{letter}, right is {right}")


def gold_letter(gold: str, options: Sequence[str]) -> str | None:
    """The letter of a reference answer: given as such, or as the text of exactly one option."""
    letters = LETTERS[: len(options)]
    bare = re.fullmatch(r"\(?([A-Za-z])[.):]?", gold)
    if bare and bare[1].upper() in letters:
        return bare[1].upper()
    plain = _plain_option(gold)
    found = []
    for letter, option in zip(letters, options, strict=False):
        label = option_label(letter)
        texts = {_plain_option(option), _plain_option(label.sub("", option, count=1))} - {""}
        if plain in texts or _plain_option(label.sub("", gold, count=1)) in texts:
            found.append(letter)
    return found[0] if len(found) == 1 else None


def _plain_option(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .")


def _temporal(sample: Sample, gold: str, answer: str | None) -> Score:
    right = extract_window(gold)
    if right is None:
        return Score.unscored(f"sample {sample.id}: the reference answer {gold[:60]!r} is no time window")
    found = extract_window(answer or "")
    if found is None:
        return Score(0.0, None, "no time window in the answer" if answer else "no answer")
    shown = f"{found[0]:g} - {found[1]:g}"
    return Score(window_iou(found, right), shown, f"IoU with {right[0]:g} - {right[1]:g}")


def window_iou(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Intersection over union of two windows (start < end)."""
    common = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    return common / ((one[1] - one[0]) + (other[1] - other[0]) - common)


_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# a number with its sign and decimals, a character of a script without spaces, or a word
_WORD = re.compile(
    r"(?<![\w.])-?(?:\d+(?:\.\d+)?|\.\d+)(?![^\W_])|[\u3040-\u30ff\u3400-\u9fff]"
    r"|(?:(?![\u3040-\u30ff\u3400-\u9fff])[^\W_])+(?:['’](?:(?![\u3040-\u30ff\u3400-\u9fff])[^\W_])+)*"
)
_NO_CONTENT = ("the", "an")


def answer_tokens(text: str) -> list[str]:
    """The words and numbers of an answer, for comparing: no case, no punctuation, no "the" and "an".

    Decimals stay numbers (1.5 is not 15; 1.50 is 1.5), and single letters stay ("vitamin A"), the letter a included.
    """
    text = unicodedata.normalize("NFKC", text).casefold().replace("−", "-")
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    tokens = [_number(token) for token in _WORD.findall(text)]
    return [token for token in tokens if token not in _NO_CONTENT] or tokens


def _number(token: str) -> str:
    if "." not in token:
        return token.replace("’", "'")
    sign, digits = ("-", token[1:]) if token.startswith("-") else ("", token)
    whole, _, decimals = digits.partition(".")
    decimals = decimals.rstrip("0")
    return sign + (whole or "0") + (f".{decimals}" if decimals else "")


def token_f1(answer: str, gold: str) -> float:
    """F1 of the tokens of two texts, counted with multiplicity (source: SQuAD); 0.0 if either has none."""
    found, right = Counter(answer_tokens(answer)), Counter(answer_tokens(gold))
    common = (found & right).total()
    return 2 * common / (found.total() + right.total()) if common else 0.0


# ---------------------------------------------------------------------------------------------------- format

_AFTER_OPEN_THINK = re.compile(r"<tool_|<answer>|<\|im_end\|>")


def format_graded(text: str, *, answer_suffix: bool = True, anchor_weight: float = 0.5) -> float:
    """The published graded format score of concatenated assistant turns; at most 1, at least -0.3 * anchor_weight.

    Source: the public release's format reward (FACTS 5.1). `answer_suffix=False` is its vanilla variant, which has no
    anchor: `anchor_weight` then has no effect.
    """
    think_ok = _think_ok(text)
    answered = any(body.strip() for body in _bodies(text, "answer"))
    score = 0.0
    if think_ok:
        score += 0.2 if answer_suffix else 0.3
    if answered:  # the two parts are for the opening and for the closing tag
        score += 0.3 if answer_suffix else 0.2
        score += 0.2 if answer_suffix else 0.1
    if answer_suffix:
        anchor = 0.0
        if think_ok and "</think>" in text:
            anchor += 0.4
            if answered:
                anchor += 0.3
        if "<think>" in text and "</think>" not in text:
            anchor -= 0.3
        score += anchor_weight * anchor
    if _thinks_before_call(text) and _has_parsable_call(text):
        score += 0.3
    if score > 0 and all(
        text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in ("think", "tool_call", "tool_code", "answer")
    ):
        score += 0.1
    return min(score, 1.0)


def _bodies(text: str, tag: str, *, unclosed: bool = False) -> Iterator[str]:
    """What stands between each pair of tags; `unclosed` also takes what follows a last tag that isn't closed."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    at = 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            if unclosed:
                yield text[start:]
            return
        yield text[start:end]
        at = end + len(closing)


def _think_ok(text: str) -> bool:
    body = next(_bodies(text, "think", unclosed=True), "")
    if "</think>" not in text.partition("<think>")[2] and (end := _AFTER_OPEN_THINK.search(body)):
        body = body[: end.start()]
    return len(body.strip()) >= 10


def _thinks_before_call(text: str) -> bool:
    calls = [at for tag in ("<tool_call>", "<tool_code>") if (at := text.find(tag)) >= 0]
    return bool(calls) and 0 <= text.find("<think>") < min(calls)


def _has_parsable_call(text: str) -> bool:
    def real(tag: str) -> list[str]:
        bodies = (body.strip() for body in _bodies(text, tag, unclosed=True))
        return [body for body in bodies if body and not body.startswith(END_OF_TURN)]

    lines = (line.strip() for body in real("tool_code") for line in body.splitlines())
    return any(map(_is_named_object, real("tool_call"))) or any("(" in ln and not ln.startswith("#") for ln in lines)


def _is_named_object(body: str) -> bool:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "name" in value


def assistant_text(episode: Episode, *, with_prefix: bool = True) -> str:
    """The assistant turns, end-of-turn tokens included, as one text; without the forced prefixes if they are hidden."""
    sampled = [segment.text for segment in episode.main.segments if segment.sampled]
    if not with_prefix:
        return "".join(sampled)
    prefixes = (forced_prefix(turn, text) for turn, text in zip(episode.turns, sampled, strict=True))
    return "".join(prefix + text for prefix, text in zip(prefixes, sampled, strict=True))


def forced_prefix(turn: Turn, sampled: str) -> str:
    """What was forced at the beginning of a turn: what the turn has that was not sampled."""
    return turn.text[: len(turn.text) - len(parse_turn(sampled, {}).text)]


def format_strict(episode: Episode) -> bool:
    """Is every assistant turn strict, and does the last one answer, unforced?"""
    strict = bool(episode.turns) and all(turn.strict for turn in episode.turns)
    return strict and episode.turns[-1].answer is not None and not episode.forced


def junk_after_answer(episode: Episode) -> bool:
    """Does any turn that answers go on after the answer it gave?"""
    return any(_after_answer(turn).strip() != "" for turn in episode.turns)


def _after_answer(turn: Turn) -> str:
    """What follows the answer of a turn; "" if it gives none or doesn't close it."""
    if turn.answer is None:
        return ""
    tags = structural_spans(turn.text)
    quoted = False  # inside a think that is closed later
    for n, (tag, following) in enumerate(pairwise(tags)):
        if tag.tag == "<think>":
            edge = next((t.tag for t in tags[n + 1 :] if t.tag in ("<think>", "</think>")), None)
            quoted = edge == "</think>"
        elif tag.tag == "</think>":
            quoted = False
        elif tag.tag == "<answer>" and not quoted and following.tag.startswith("</"):  # any closing tag ends it
            body = turn.text[tag.end : following.start].strip()
            if body == turn.answer:
                return turn.text[following.end :]
    return ""


def turn_kinds(episode: Episode) -> tuple[FormatKind, ...]:
    """What is wrong with each assistant turn, by name; for logs."""
    stops = turn_stops(episode.main)
    kinds = [turn_kind(turn, stop) for turn, stop in zip(episode.turns, stops, strict=True)]
    if episode.forced and kinds:
        kinds[-1] = "forced"
    return tuple(kinds)


# ---------------------------------------------------------------------------------------------------- tools


def tool_reward(episode: Episode, accuracy_score: Score, *, call_cost: float = 0.0) -> Score:
    """0 without a call that parses; else 0.1, or 0.3 if one was executed, and 0.5 more if the accuracy is >= 0.5.

    Facts of the episode, not tags in its text; only `call_cost` (for each executed call) depends on their number.
    """
    if not episode.scored:
        return _failed(episode)
    if not any(turn.runnable for turn in episode.turns):
        return Score(0.0, None, "no call")
    if accuracy_score.value is None:
        return Score.unscored(accuracy_score.explanation)
    executed = episode.tool_calls
    value = (0.3 if executed else 0.1) + (0.5 if accuracy_score.value >= 0.5 else 0.0) - call_cost * executed
    return Score(value, None, f"{executed} calls executed")


# ---------------------------------------------------------------------------------------------------- user rewards


@cache
def load_function(name: str) -> RewardFunction:
    """The user reward named "module:function". Raises RecipeError if there is none."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise RecipeError(f'reward function {name!r}: write it as "module:function"')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RecipeError(f"reward function {name!r}: {error}; is its folder in PYTHONPATH?") from error
    except (SyntaxError, TypeError, ValueError) as error:
        raise RecipeError(f"reward function {name!r}: cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RecipeError(f"reward function {name!r}: {module_name} has no function {function_name}")
    loaded: RewardFunction = function
    return loaded


def _user_score(name: str, score: object) -> Score:
    """What a user reward returned: a Score, or a number for one."""
    value = score.value if isinstance(score, Score) else score
    if isinstance(score, Score) and value is None:
        return score
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecipeError(f"reward function {name!r} returned {score!r:.80}; it must be a finite number or a Score")
    return score if isinstance(score, Score) else Score(float(value))


# ---------------------------------------------------------------------------------------------------- logs


def logged(episode: Episode) -> dict[str, float]:
    """What is logged of an episode in every arm, whatever is paid; means over episodes are the rates of the paper."""
    stops = turn_stops(episode.main)
    return {
        "f_strict": float(format_strict(episode)),
        "f_graded": format_graded(assistant_text(episode)),
        "f_release": format_graded(assistant_text(episode, with_prefix=False)),
        "kappa": float(episode.tool_calls),
        "attempts": float(sum(len(turn.calls) for turn in episode.turns)),
        "junk": float(junk_after_answer(episode)),
        "answered": float(episode.answer is not None),
        "forced": float(episode.forced),
        "turns": float(len(episode.turns)),
        "length_stops": float(sum(stop == "length" for stop in stops)),
        "report_length_stops": float(
            sum(crop.trace is not None and crop.trace.stop_reason == "length" for crop in episode.crops)
        ),
    }
