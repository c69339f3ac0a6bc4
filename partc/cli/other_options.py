"""Options that a command has not: what other tools, or other commands of partc, mean by them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from itertools import takewhile

from partc.wrong_calls import did_you_mean

_WORDS = {  # choices that are called otherwise here
    "pipeline": "A pipeline's schedule is --of grid.",
    "schedule": "A pipeline's schedule is --of grid.",
    "k8s": "It is called kubernetes here.",
}
_OPTIONS = {  # options that other tools have: what says the same here
    "--preset": "A preset is a plan: --plan ddp.",
    "--strategy": "It is called --plan here: --plan fsdp.",
    "--output": "It is called --out here.",
    "--output-dir": "It is called --out here.",
    "--num-layers": "It is called --layers here.",
}
_RANKS = (
    "--nproc-per-node", "--nproc", "--num-processes", "--num-gpus", "--gpus", "--ranks",
    "--world-size", "--devices",
)  # fmt: skip
_MESH = {
    **dict.fromkeys(_RANKS, "Ranks are those of the mesh: --mesh dp=4; torchrun starts them."),
    "--dp": "Axes stand in the mesh: --mesh dp=2,tp=2.",
    "--tp": "Axes stand in the mesh: --mesh dp=2,tp=2.",
    "--pp": "Axes stand in the mesh: --mesh dp=2,pp=2.",
}
_FLAGS = {  # options without a value: what somebody means who gives them one
    "--processes": "All ranks of the program run, as many as its mesh has: leave the number out.",
}
_COMPILED = (*_OPTIONS, "--mesh", "--plan", "--microbatches", "--schedule", "--recompute")
_OF_PROGRAMS = (  # commands that read a saved program
    "bench", "check", "compare", "doctor", "explain", "launch", "picture", "report", "simulate",
    "verify",
)  # fmt: skip


def meant(command: str, word: str, known: Sequence[str]) -> str:
    """What to write in the place of an option or a choice; "" where nobody knows.

    ``command`` as users type it, ``known``: the options that it has. One that reads a saved
    program takes no mesh, as that was decided when the program was compiled.
    """
    option = word.replace("_", "-")
    if word in _WORDS or option in known:
        return _WORDS.get(word) or f"Write {option}."
    if option in _RANKS and (own := [each for each in ("--ranks", "--devices") if each in known]):
        return f"Write {own[0]} 4."
    if "--mesh" in known:
        return _MESH.get(option) or _OPTIONS.get(option) or did_you_mean(word, known)
    if command.rpartition(" ")[2] in _OF_PROGRAMS and option in (*_MESH, *_COMPILED):
        return _of_a_program(command, option)
    return did_you_mean(word, known)


def _of_a_program(command: str, option: str) -> str:
    """What to do about an option that was decided when a program was compiled."""
    if option not in _RANKS:
        return "A saved program is that of one mesh and plan: partc compile makes another."
    starts = f"; {command} starts all of them" if command == "partc bench" else ""
    return (
        f"The mesh of the program says how many ranks there are{starts}. Leave it out; for "
        "another number compile again: partc compile --mesh dp=4."
    )


def without_value(option: str, word: str) -> str:
    """What is wrong with a word behind an option that takes none, and what to do."""
    told = _FLAGS.get(option, "Leave it out.")
    return f"{option} takes no value, and {word!r} stands behind it. {told}"


def of_script(given: Sequence[str], word: str, known: Collection[str]) -> str:
    """How a script's own arguments are given to ``partc launch``, of which ``word`` may be one.

    ``given``: the command line; ``known``: the options of the command.
    """
    at = next((i for i, each in enumerate(given) if each.partition("=")[0] == word), 0)
    rest = given[at + (word == "--args") :]
    own = rest[:1] if word != "--args" else []
    own = [*own, *takewhile(lambda each: each not in known, rest[len(own) :])]
    return f'Arguments of the script go in one word: --args="{shlex.join(own)}".'


def behind_dashes(prog: str, given: Sequence[str], first: str) -> str:
    """What is wrong with a launcher's command line that has no ``--`` before it, and its mend:
    the line as it should be. ``given`` to the command ``prog``; ``first`` is the launcher.
    """
    at = list(given).index(first)
    line = shlex.join([*given[:at], "--", *given[at:]])
    return (
        f"no -- stands before the command {first!r} (its options are taken for those of {prog}). "
        f"Write {prog} {line}."
    )
