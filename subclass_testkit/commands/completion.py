"""Shell completion: a script that knows the commands, their options and the ids of all checks."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")

_BASH = """_subclass_testkit() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" i command=""
    for (( i = 1; i < COMP_CWORD; i++ )); do
        [[ "${{COMP_WORDS[i]}}" == -* ]] || {{ command="${{COMP_WORDS[i]}}"; break; }}
    done
    case "$command" in
{cases}
        "") words="{commands}" ;;
    esac
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
    [[ -n "$command" && "$word" != -* && "$command" != explain && "$command" != list ]] && COMPREPLY+=( $(compgen -f -- "$word") )
    return 0
}}
complete -o filenames -F _subclass_testkit subclass-testkit
"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """What a shell evaluates: ``eval "$(subclass-testkit completion bash)"``.

    Raises:
        ValueError: a shell without completion; names those that have one.
    """
    from subclass_testkit.check import did_you_mean, registry

    if shell not in SHELLS:
        raise ValueError(f"there is no completion for {shell!r}{did_you_mean(shell, SHELLS)}")
    commands = _commands(parser)
    ids = " ".join(registry())
    if shell == "fish":
        return _fish(commands, ids)
    options = {name: " ".join(_options(command)) for name, command in commands.items()}
    for name in ("explain", "list"):
        options[name] += f" {ids}"
    options["completion"] += " " + " ".join(SHELLS)
    cases = "\n".join(f'        {name}) words="{words}" ;;' for name, words in options.items())
    text = _BASH.format(cases=cases, commands=" ".join(commands))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _fish(commands: dict[str, argparse.ArgumentParser], ids: str) -> str:
    lines = [f"complete -c subclass-testkit -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    for name, command in commands.items():
        when = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c subclass-testkit {when} -l {option.removeprefix('--')}" for option in _options(command)]
    lines.append(f"complete -c subclass-testkit -n '__fish_seen_subcommand_from explain list' -f -a '{ids}'")
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _options(command: argparse.ArgumentParser) -> list[str]:
    return [option for action in command._actions for option in action.option_strings if option.startswith("--")]
