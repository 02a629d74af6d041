"""Commands about servers: run one, measure several."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo.cli.command import command
from kangaroo.cli.schema import LoadCommand, ServeCommand
from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation import records as store
from kangaroo.serving.serve import serve as run_server
from kangaroo.under_load import report, run

log = logging.getLogger(__name__)


@command("serve")
def serve(config: ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    run_server(config.model, config.drafter, config)


@command("load", goes_on=True)
def load(config: LoadCommand) -> None:
    """Measure servers by how many ask at the same time; print the table and write the files."""
    # settings stay where ~drafter@drafters.NAME has left their drafter out
    drafters = {k: one for k, one in config.drafters.items() if isinstance(one, DrafterConfig)}
    measured = run.run(config.model, drafters, config)
    folder = Path(config.output)
    found = report.summarise(measured, store.begun(folder))
    report.write(found, folder)
    Console().print(report.terminal_table(found))
    log.info("%s, %s and %s are in %s", report.PAGE, report.PLOT, report.RESULTS, folder)
