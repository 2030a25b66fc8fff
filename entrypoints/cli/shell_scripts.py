"""Completion scripts of bash, zsh and fish for a list of commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class _Flag(Protocol):
    """A flag of a command (``completion.ShellFlag``)."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def help(self) -> str: ...
    @property
    def takes_value(self) -> bool: ...
    @property
    def choices(self) -> tuple[str, ...]: ...


class _Command(Protocol):
    """A command with its words (``completion.CommandWords``)."""

    @property
    def path(self) -> tuple[str, ...]: ...
    @property
    def commands(self) -> dict[str, str]: ...
    @property
    def flags(self) -> Sequence[_Flag]: ...


def bash_script(commands: Sequence[_Command]) -> str:
    """Return the script for bash: ``source <(glowplug completion bash)``."""
    lines = ["# Completion of glowplug for bash, made by `glowplug completion bash`."]
    lines.append("declare -gA _glowplug_words _glowplug_flags _glowplug_values")
    for command in commands:
        key = " ".join(command.path)
        flags = [name for flag in command.flags for name in flag.names]
        lines.append(f"_glowplug_words[{_quoted(' ' + key)}]={_quoted(' '.join(command.commands))}")
        lines.append(f"_glowplug_flags[{_quoted(' ' + key)}]={_quoted(' '.join(flags))}")
        for flag in command.flags:
            for name in flag.names if flag.takes_value else ():
                place = f"_glowplug_values[{_quoted(f' {key} {name}')}]"
                lines.append(f"{place}={_quoted(' '.join(flag.choices) or '@file')}")
    return "\n".join([*lines, _BASH])


_BASH = r"""
_glowplug() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  local path= word values at=1
  COMPREPLY=()
  while ((at < COMP_CWORD)); do
    word=${COMP_WORDS[at]}
    [[ " ${_glowplug_words[ $path]-} " == *" $word "* ]] || break
    [[ -n ${_glowplug_flags[ ${path:+$path }$word]+x} ]] || break
    path=${path:+$path }$word
    ((at += 1))
  done
  values=${_glowplug_values[ $path ${before//_/-}]-}
  if [[ $before == -* && -n $values ]]; then
    if [[ $values == @file ]]; then
      mapfile -t COMPREPLY < <(compgen -f -- "$current")
    else
      mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
    fi
  elif [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "${_glowplug_flags[ $path]-}" -- "$current")
  elif [[ -n ${_glowplug_words[ $path]-} ]]; then
    mapfile -t COMPREPLY < <(compgen -W "${_glowplug_words[ $path]-}" -- "$current")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
  fi
}
complete -o filenames -F _glowplug glowplug
"""


def zsh_script(commands: Sequence[_Command]) -> str:
    """Return the script for zsh: ``source <(glowplug completion zsh)`` after ``compinit``."""
    lines = ["#compdef glowplug", "# Made by `glowplug completion zsh`."]
    lines.append("typeset -gA _glowplug_commands _glowplug_options")
    for command in commands:
        key = _quoted("/" + "/".join(command.path))
        words = [
            _described(name, text).replace("\n", " ") for name, text in command.commands.items()
        ]
        options = [spec for flag in command.flags for spec in _zsh_options(flag)]
        lines.append(f"_glowplug_commands[{key}]={_quoted(chr(10).join(words))}")
        lines.append(f"_glowplug_options[{key}]={_quoted(chr(10).join(options))}")
    return "\n".join([*lines, _ZSH])


_ZSH = r"""
_glowplug() {
  local path_=/ at=2
  local -a words_ options
  while ((at < CURRENT)); do
    words_=("${(@f)_glowplug_commands[$path_]}")
    [[ -n ${(M)words_:#${words[at]}(|:*)} ]] || break
    (( ${+_glowplug_options[${path_%/}/${words[at]}]} )) || break
    path_=${path_%/}/${words[at]}
    ((at += 1))
  done
  words_=("${(@f)_glowplug_commands[$path_]}")
  options=("${(@f)_glowplug_options[$path_]}")
  if [[ -n ${words_[1]} && ${words[CURRENT]} != -* && ${words[CURRENT-1]} != -* ]]; then
    _describe 'command' words_
  else
    words=("${words[1]}" "${(@)words[at,-1]}")
    ((CURRENT -= at - 2))
    _arguments -S $options '*:file:_files'
  fi
}
compdef _glowplug glowplug
"""


def _zsh_options(flag: _Flag) -> Iterator[str]:
    """Yield the entries of a flag for ``_arguments``, one for each spelling."""
    value = ""
    if flag.takes_value:
        value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
    for name in flag.names:
        text = flag.help.translate(str.maketrans("[]:\\", "();/"))
        yield f"*{name}[{text}]{value}"


def fish_script(commands: Sequence[_Command]) -> str:
    """Return the script for fish: ``glowplug completion fish | source``."""
    paths = ["".join(f" {word}" for word in command.path) for command in commands]
    lines = ["# Completion of glowplug for fish, made by `glowplug completion fish`."]
    lines += ["set -g __glowplug_paths " + " ".join(map(_fish_quoted, paths)), _FISH]
    for command, path in zip(commands, paths, strict=True):
        at = f"-n {_fish_quoted(f'__glowplug_at {_fish_quoted(path)}')}"
        for name, text in command.commands.items():
            lines.append(f"complete -c glowplug {at} -f -a {name} -d {_fish_quoted(text)}")
        lines += [f"complete -c glowplug {at} {_fish_flag(flag)}" for flag in command.flags]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: _Flag) -> str:
    """Return the arguments of ``complete`` for a flag."""
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
    )
    values = f" -xa {_fish_quoted(' '.join(flag.choices))}" if flag.choices else ""
    needs = values or (" -rF" if flag.takes_value else "")
    return f"{names}{needs} -d {_fish_quoted(flag.help)}"


_FISH = r"""
function __glowplug_at
    # the words before the cursor that are commands are $argv
    set -l path
    for word in (commandline -opc)[2..-1]
        contains -- "$path $word" $__glowplug_paths; or break
        set path "$path $word"
    end
    test "$path" = "$argv[1]"
end
"""


def _described(name: str, text: str) -> str:
    """Return a word and its description for ``_describe``."""
    escaped = name.replace(":", r"\:")
    return f"{escaped}:{text}" if text else escaped


def _quoted(text: str) -> str:
    return shlex.quote(text)


def _fish_quoted(text: str) -> str:
    """Return ``text`` in single quotes for fish, which has escapes within them."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


#: shell -> function that makes its script
SCRIPTS: dict[str, Callable[[Sequence[_Command]], str]] = {
    "bash": bash_script,
    "fish": fish_script,
    "zsh": zsh_script,
}
