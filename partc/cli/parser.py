"""The parser of the command line: what it answers to words that it does not know."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from partc.errors import visible

OF_HF = ("--batch", "--seq", "--layers", "--dtype")


class Parser(argparse.ArgumentParser):
    """Answers what it does not know with what may be meant, in one line, and not with all options.

    ``partc compile m:f --plans ddp`` asks whether ``--plan`` is meant.
    """

    given: Sequence[str] = ()  # to this command, as far as -- stands before a launcher's line

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.values: dict[str, Any] = {}  # of options, by name, while a line is read
        for name in (None, "store"):
            self.register("action", name, _Once)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given, self.values = [*takewhile(lambda each: each != "--", args or ())], {}
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            if line := getattr(found, "line", None):  # that of a launcher
                self._tell_of_dashes(args, line[0], unknown[0])
            self._tell_of_value(unknown[0])
            self._tell_of_list(unknown[0])
            self._tell_of_folder(unknown[0])
            self.error(f"there is no option or argument {unknown[0]!r}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        for kind, words in (("int", "whole number"), ("float", "number")):
            message = re.sub(rf"invalid {kind} value: (.*)", rf"\1 is no {words}", message)
        if (of_hf := re.match(r"argument (--[\w-]+): ", message)) and of_hf[1] in OF_HF:
            self._tell_of_hf(of_hf[1])
        given, _, choices = message.partition(" (choose from ")
        known = re.findall(r"'([^']+)'", choices) or re.findall(r"--[\w-]+", self.format_usage())
        word = re.findall(r"'([^']*)'", given)
        meant = self._meant(word[-1].partition("=")[0], known) if word else ""
        if word and re.fullmatch(r"[a-z]\w*=[0-9]+", word[-1]):
            meant = f"Axes are joined by commas in one word: --mesh dp=2,{word[-1]}."
        if given.startswith("the following arguments are required: "):
            if strange := next(filter(self._is_strange, self.given), None):
                self.error(f"there is no option or argument {strange!r}")
            needed = (_as_written(each) for each in self._actions if each.required)
            meant = f"Write {self.prog} {' '.join(needed)}."
        if word == ["run"]:
            meant = "A program runs by torchrun: torchrun --nproc-per-node 2 FOLDER/run.py."
        if word and (size := re.fullmatch(r"([0-9]+) ?([KMGT])i?B?", word[-1])):
            meant = f"Write {int(size[1]) * 1000 ** ('KMGT'.index(size[2]) + 1)}."
        if valued := re.fullmatch(r"argument (\S+): ignored explicit argument '(.*)'", message):
            self._refuse_value(valued[1].rpartition("/")[2], valued[2])
        if given == "argument --args: expected one argument":
            meant = self._meant("--args", [])
        self.refuse(f"{message}. {meant or _number_meant(message, word)}")

    def refuse(self, text: str) -> NoReturn:
        """End with what is wrong and what to do about it, in one line."""
        said = f"{self.prog}: {text}".strip()
        self.exit(2, f"PTC080 {visible(said)} See `{self.prog} --help`.\n")

    def check_once(self, option: str, first: str, now: str) -> None:
        """End where an option is given twice, with other values."""
        if first != now:
            said = f"{option} is given twice, as {first!r} and as {now!r}, and only one counts"
            joined = f": {option} {first},{now}" if self._is_list(option) else ""
            self.refuse(f"{said}. Give it once{joined}.")

    def _is_list(self, option: str) -> bool:
        """Whether an option takes several names, joined by commas."""
        known = self._option_string_actions.get(option)
        return known is not None and "," in str(known.metavar)

    def _tell_of_hf(self, option: str) -> None:
        """End where an option of an hf: model is given beside another one, whatever its value."""
        models = [re.fullmatch(r"(?:--model=)?([\w.]+:\w+)", each) for each in self.given]
        other = next((each[1] for each in models if each and not each[1].startswith("hf:")), "")
        if other:
            why = "which says what the configuration of an hf: model leaves open"
            do = "Leave it out, and let the function return a model and inputs of that size."
            self.refuse(f"{other} does not follow {option}, {why}. {do}")

    def _tell_of_list(self, word: str) -> None:
        """End where names stand in several words behind an option that takes them in one."""
        at = [*self.given].index(word) if word in self.given else 0
        option = self.given[at - 2] if at > 1 else ""
        if self._is_list(option) and not word.startswith("-"):
            rest = takewhile(lambda each: not each.startswith("-"), self.given[at - 1 :])
            said = f"{option} takes its names in one word, and {word!r} is another"
            self.refuse(f"{said}. Write {option} {','.join(rest)}.")

    def _tell_of_folder(self, word: str) -> None:
        """End where a folder stands behind that of the one program that a command takes."""
        if not word.startswith("-") and Path(word).is_dir():
            self.refuse(
                f"it takes one program, and {word!r} is another folder. Two programs are compared "
                "by `partc diff ONE OTHER`, several by `partc compare FOLDER ...`."
            )

    def _is_strange(self, word: str) -> bool:
        """Whether a word is an option that the command has not, nor any that begins so."""
        name = word.partition("=")[0]
        known = (option for each in self._actions for option in each.option_strings)
        return word.startswith("--") and not any(option.startswith(name) for option in known)

    def _tell_of_dashes(self, given: list[str], first: str, unknown: str) -> None:
        """End where a launcher's command, whose first word this is, has no ``--`` before it."""
        if "--" not in given and given.index(first) < given.index(unknown):
            from partc.cli.other_options import behind_dashes

            self.refuse(behind_dashes(self.prog, given, first))

    def _tell_of_value(self, word: str) -> None:
        """End where a word stands behind an option that takes none: ``--processes 2``."""
        at = [*self.given].index(word) if word in self.given else 0
        option = self._option_string_actions.get(self.given[at - 1]) if at else None
        if option is not None and option.nargs == 0 and not word.startswith("-"):
            self._refuse_value(self.given[at - 1], word)

    def _refuse_value(self, option: str, word: str) -> NoReturn:
        from partc.cli.other_options import without_value

        self.refuse(without_value(option, word))

    def _meant(self, word: str, known: list[str]) -> str:
        from partc.cli.other_options import meant, of_script

        near = meant(self.prog, word, known)
        if self.prog == "partc launch" and word.startswith("--") and not near.startswith("Write"):
            return f"{near} {of_script(self.given, word, self._option_string_actions)}".strip()
        return near


class _Once(argparse._StoreAction):
    """An option with a value: of two, argparse would take the last without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        if isinstance(parser, Parser) and option_string is not None:
            first = parser.values.setdefault(self.dest, values)
            parser.check_once(option_string, str(first), str(values))
        super().__call__(parser, namespace, values, option_string)


def _number_meant(message: str, words: list[str]) -> str:
    """How a number is written that somebody gave in percent, or with a comma; "" for others."""
    if not message.endswith("is no number") or not words:
        return ""
    plain = re.fullmatch(r"([0-9]+(?:[.,][0-9]+)?) ?(%?)", words[-1])
    if plain is None:
        return "Write it with digits: 0.001, or 1e-3."
    number = float(plain[1].replace(",", ".")) / (100 if plain[2] else 1)
    return f"Write {number:g}."


def _as_written(needed: argparse.Action) -> str:
    """An argument as it stands in a command: ``--mesh MESH``; ``OLD`` for one without a name."""
    value = str(needed.metavar or needed.dest.upper())
    return " ".join([*needed.option_strings[-1:], value])
