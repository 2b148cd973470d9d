"""YAML files whose mistakes are named by their line.

PyYAML's nodes know their lines. Aliases and repeated keys are refused: the first can make a small file
enormous, the second silently loses a value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from dendritic_lab.lab.experiments import Experiment, UsageError

MOST_BYTES, MOST_LEVELS = 1_000_000, 20
OPENING = (
    yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken)
CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


@dataclass(frozen=True)
class Lines:
    "The lines of a YAML file on which its values stand, and checks that name them."
    file: str
    at: dict[tuple, int]  # keys and places in lists that lead to a value -> line, from 1

    def error(self, message: str, *path) -> UsageError:
        "To be raised: `message` with the line of the value at `path`, or of the nearest one around it."
        path = tuple(map(str, path))
        while path not in self.at: path = path[:-1]
        return UsageError(f"{self.file}, line {self.at[path]}: {message}")

    def mapping(self, value: object, what: str, *path) -> dict:
        "`value`, if it is a mapping of names. Raises `UsageError` otherwise."
        if isinstance(value, dict) and all(isinstance(k, str) for k in value): return value
        raise self.error(f"{what}: expected a mapping of names to values, got {value!r}", *path)

    def known_keys(self, value: dict, known, *path):
        "Raises `UsageError` for a key that is not among `known`."
        for key in value:
            if key not in known: raise self.error(f"expected one of {', '.join(known)}, got {key!r}", *path, key)

    def parameter(self, experiment: Experiment, name: str, value: object, *path) -> object:
        "`value` as the experiment's parameter has it. Raises `UsageError` for one it does not take."
        try: return experiment.resolve("smoke", {name: value})[name]
        except UsageError as e: raise self.error(str(e), *path) from None


def read_yaml(path: Path) -> tuple[object, Lines]:
    "The content of a YAML file and its lines. Raises `UsageError`, with the line where there is one."
    path = Path(path)
    try: text = path.read_bytes()
    except OSError as e: raise UsageError(f"cannot read {path}: {e.strerror}") from e
    if len(text) > MOST_BYTES: raise UsageError(f"{path.name} has {len(text):,} bytes; at most {MOST_BYTES:,} are read")
    try:
        _refuse_bombs(path.name, text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None: raise UsageError(f"{path.name} is empty")
        return yaml.safe_load(text), _lines_of(path.name, node)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{path.name}, line {mark.line + 1 if mark else 1}"
        raise UsageError(f"{where}: not valid YAML: {e.problem or e.context}") from None
    except UsageError: raise
    except (yaml.YAMLError, ValueError) as e:
        raise UsageError(f"{path.name} is not valid YAML: {str(e).splitlines()[0]}") from None


def _refuse_bombs(name: str, text: bytes):
    "Raises `UsageError` for an alias and for too many levels, before anything is built."
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        depth += isinstance(token, OPENING) - isinstance(token, CLOSING)
        where = f"{name}, line {token.start_mark.line + 1}"
        if depth > MOST_LEVELS: raise UsageError(f"{where}: expected at most {MOST_LEVELS} levels, one in another")
        if isinstance(token, yaml.AliasToken):
            raise UsageError(f"{where}: expected no alias, got *{token.value}: write the value out")


def _lines_of(name: str, node: yaml.Node) -> Lines:
    "The line of every value. Raises `UsageError` for a key that is given twice."
    lines = Lines(name, {})
    for place, line in _walk(node):
        if place in lines.at:
            first = lines.at[place]
            raise UsageError(f"{name}, line {line}: {place[-1]!r} is given twice, the first time in line {first}")
        lines.at[place] = line
    return lines


def _walk(node: yaml.Node, path: tuple = ()) -> Iterator[tuple[tuple, int]]:
    "Every value of a node with its line."
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value: yield from _walk(value, (*path, str(key.value)))
    if isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value): yield from _walk(value, (*path, str(i)))
