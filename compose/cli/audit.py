"""`audit`: the log against itself, the table of holdings, the stream and the live state."""

import asyncio
from pathlib import Path

import asyncpg
import click
import structlog

from compose.cli.options import as_json, echo_json
from compose.directory import plane_of
from compose.refusal import EnvironmentRefusal
from controlplane import parties
from controlplane.audit import Report
from controlplane.audit import audit as check
from controlplane.bus import Bus
from controlplane.log.postgres import PostgresLog
from controlplane.plane import Plane
from controlplane.refusal import Refused


@click.command()
@as_json
@click.pass_context
def audit(context: click.Context, json: bool) -> None:
    """Check the log against itself, the stream and the live state; exit code 1 when something is wrong."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # what matters is in the report
    data: Path = context.obj
    plane = plane_of(data)
    try:
        report = asyncio.run(_audit(plane))
    except (OSError, asyncpg.PostgresError, Refused) as error:
        raise EnvironmentRefusal("away", f"The plane does not answer: {error}.", "Is `enginehouse up` running?") from error
    if json:
        echo_json(report)
    else:
        for finding in report.findings:
            click.echo(f"{finding.code}: {finding.message}" + (f" (event {finding.position})" if finding.position else ""))
        compared = f"{report.events} events, {report.in_stream} in the stream, {report.cells} cells held"
        state = f", state at {report.state_position}" if report.state_position is not None else ""
        click.echo(f"{'clean' if report.clean else f'{len(report.findings)} findings'}: {compared}{state}")
    if not report.clean:
        context.exit(1)


async def _audit(plane: Plane) -> Report:
    log = await PostgresLog.open(plane.postgres_url)
    try:
        bus = await Bus.connect(plane, "audit", parties.READER, deadline_s=5)
        try:
            return await check(log, bus)
        finally:
            await bus.close()
    finally:
        await log.close()
