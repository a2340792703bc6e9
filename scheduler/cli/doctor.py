"""The command that checks the installation."""

from __future__ import annotations

import argparse
import json

from scheduler.cli.answers import DONE, PROVEN_NO
from scheduler.cli.arguments import Commands, add_command
from scheduler.doctor import can_solve, examine


def add_doctor(commands: Commands) -> None:
    """Add `scheduler doctor`."""
    add_command(
        commands, "doctor", _doctor, "check the installation and suggest fixes; exit 1 if nothing can be solved"
    )


def _doctor(options: argparse.Namespace) -> int:
    findings = examine()
    if options.json:
        print(json.dumps([finding.to_dict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.part.name:<14}  {finding.state:<8}  {finding.detail}")
            if finding.state != "ok":
                print(f"{'':<26}for {finding.part.purpose}: {finding.part.fix}")
    return DONE if can_solve(findings) else PROVEN_NO
