"""The command line itself: version, help, and that every command it names exists."""

import importlib

import pytest
from typer.testing import CliRunner

from longrecall.results.main import BENCHES, COMMANDS, build_app
from longrecall.results.report import version


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(build_app(["--version"]), ["--version"])
    assert done.exit_code == 0 and done.output == f"longrecall {version()}\n"


@pytest.mark.parametrize("argv", [["-h"], ["--help"]])
def test_help_names_every_command(argv: list[str]) -> None:
    done = CliRunner().invoke(build_app(argv), argv)
    assert done.exit_code == 0 and all(name in done.output for name in COMMANDS)


@pytest.mark.parametrize("target", [command.target for command in (*COMMANDS.values(), *BENCHES.values())])
def test_every_command_exists(target: str) -> None:
    module, attribute = target.split(":")
    assert callable(getattr(importlib.import_module(module), attribute))
