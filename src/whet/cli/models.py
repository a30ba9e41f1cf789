"""`whet models`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, YesOption, cli_command, confirm
from whet.core.errors import WhetError

if TYPE_CHECKING:
    from whet.registry.registry import ModelVersion, Registry

app = typer.Typer(name="models", help="Keep models by name, version and alias.")

ReferenceArgument = Annotated[
    str,
    typer.Argument(metavar="NAME[@WHICH]", help="A model; WHICH: a version or an alias; default: the newest version."),
]


@app.callback(invoke_without_command=True)
@cli_command
def models(context: typer.Context, as_json: JsonOption = False) -> dict[str, Any] | None:
    """Keep models by name, version and alias; without a command, list them."""
    return _list(None, as_json) if context.invoked_subcommand is None else None


@app.command("list")
@cli_command
def list_(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this model.", show_default=False)] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """List all versions, with their aliases, origin and validation loss."""
    return _list(name, as_json)


def _list(name: str | None, as_json: bool) -> dict[str, Any]:
    from whet.core.console import info, print_result, warn
    from whet.registry.registry import Registry, parse_reference
    from whet.report.formatting import format_table

    registry = Registry()
    if name is not None:
        name = parse_reference(name)[0]
        registry.find(name)
    names = registry.names() if name is None else [name]
    rows: list[tuple[str, ...]] = []
    models = []
    for each in names:
        targets = _alias_targets(registry, each)
        versions = []
        for number in reversed(registry.versions(each)):
            aliases = [alias for alias, target in targets.items() if target == number]
            try:
                version = registry.version(each, number)
            except WhetError as error:
                warn(str(error))
                rows.append((f"{each}@{number}", ", ".join(aliases), "", "", "cannot be read"))
                versions.append({"version": number, "aliases": aliases, "error": str(error)})
                continue
            loss = version.lineage.get("scores", {}).get("val_loss")
            rows.append((f"{each}@{number}", ", ".join(aliases), "" if loss is None else f"{loss:.4g}",
                         _format_time(version.time), _origin(version)))  # fmt: skip
            versions.append(_as_json(version) | {"aliases": aliases})
        models.append({"name": each, "versions": versions})
    if not as_json:
        if not rows:
            info(f"no models in {registry.root}. Add one: whet models add NAME RUN")
        for line in format_table(("model", "aliases", "val_loss", "added", "from"), rows) if rows else ():
            print_result(line)
    return {"registry": str(registry.root), "models": models}


@app.command()
@cli_command
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")],
    source: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A run, RUN@STEP, RUN@best, or the folder of an export.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="The run that an export came from, if the export is outside its folder; recorded as lineage.",
            show_default=False,
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Add the exported model of a run as a new version. Its files stay where they are."""
    from whet.core.console import print_result
    from whet.run.models.register_model import add_model

    version = add_model(name, source, run)
    if not as_json:
        print_result(f"{version.reference}: {version.folder}")
    return _as_json(version)


@app.command()
@cli_command
def show(reference: ReferenceArgument, quiet: QuietOption = False, as_json: JsonOption = False) -> dict[str, Any]:
    """Show a version: its files, run, data, base model, certificate, scores and notes."""
    from whet.core.console import print_result, warn
    from whet.core.yaml import dump_yaml
    from whet.registry.references import model_folder
    from whet.registry.registry import Registry, parse_reference

    registry = Registry()
    name, which = parse_reference(reference)
    number = registry.find(name, which)
    version = registry.version(name, number)
    aliases = [alias for alias, target in _alias_targets(registry, name).items() if target == number]
    notes = registry.notes(name, number)
    result = _as_json(version) | {"aliases": aliases, "notes": [asdict(each) for each in notes], "problem": None}
    try:
        model_folder(version.reference)
    except WhetError as error:
        result["problem"] = str(error)
        warn(str(error))
    if not as_json:
        lineage = dict(version.lineage)
        config = lineage.pop("config", None)  # long, so it comes last
        shown = {
            "model": version.reference, "aliases": aliases, "folder": str(version.folder), "kind": version.kind,
            "run": version.run, "step": version.step, "added": f"{_format_time(version.time)} by {version.user}",
            "notes": [f"{_format_time(each.time)} {each.user}: {each.text}" for each in notes], **lineage,
            "config": config,
        }  # fmt: skip
        print_result(dump_yaml(shown), end="")
    return result


@app.command()
@cli_command
def alias(
    reference: ReferenceArgument,
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="A name for the version, such as production.")],
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Give a version an alias, or move the alias to it. `whet models remove NAME@ALIAS` removes one."""
    from whet.core.console import info
    from whet.registry.registry import Registry, parse_reference

    registry = Registry()
    model, which = parse_reference(reference)
    number = registry.find(model, which)
    registry.version(model, number)  # a damaged version gets no alias
    registry.set_alias(model, number, name)
    info(f"{model}@{name} is version {number}")
    return {"name": model, "alias": name, "version": number}


@app.command()
@cli_command
def note(
    reference: ReferenceArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note; earlier notes stay.")],
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Add a note to a version."""
    from whet.core.console import info
    from whet.core.display import is_valid_text
    from whet.registry.registry import Registry, parse_reference

    if not text.strip() or not is_valid_text(text):
        raise WhetError(f"{text!r}: the note has no text, or text that is not valid UTF-8")
    registry = Registry()
    name, which = parse_reference(reference)
    number = registry.find(name, which)
    registry.add_note(name, number, text)
    info(f"noted on {name}@{number}")
    return {"name": name, "version": number, "notes": [asdict(each) for each in registry.notes(name, number)]}


@app.command()
@cli_command
def remove(
    reference: Annotated[
        str, typer.Argument(metavar="NAME[@WHICH]", help="A version, an alias or, given only its name, a whole model.")
    ],
    yes: YesOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Remove a version, an alias, or all of a model from the registry. The files of models are not touched."""
    from whet.core.console import info
    from whet.registry.registry import NEWEST, Registry, parse_reference

    registry = Registry()
    name, which = parse_reference(reference)
    if which is not None and which != NEWEST and which in registry.aliases(name):
        confirm(f"remove the alias {name}@{which}? Its version stays.", yes)
        registry.remove_alias(name, which)
        info(f"removed the alias {name}@{which}")
        return {"removed": [], "aliases": [which]}
    newest = registry.find(name, which)
    numbers = registry.versions(name) if which is None else [newest]
    targets = _alias_targets(registry, name)
    named = [alias for alias, target in targets.items() if target in numbers]
    if which is not None and named:
        raise WhetError(
            f"{name}@{newest} is {' and '.join(named)}. Move the alias first (whet models alias {name}@VERSION "
            f"{named[0]}), or remove it (whet models remove {name}@{named[0]})"
        )
    what = f"version {newest}" if which is not None else f"all {len(numbers)} versions and {len(targets)} aliases"
    confirm(f"remove {what} of {name} from {registry.root}? The files of the models stay.", yes)
    removed_aliases = registry.aliases(name) if which is None else []
    for each in removed_aliases:
        registry.remove_alias(name, each)
    for number in numbers:
        registry.remove(name, number)
    info(f"removed {what} of {name}")
    return {"removed": numbers, "aliases": removed_aliases}


def _alias_targets(registry: Registry, name: str) -> dict[str, int]:
    """Alias → version, of those that can be read."""
    from whet.core.console import warn

    targets = {}
    for each in registry.aliases(name):
        try:
            targets[each] = registry.alias_target(name, each)
        except WhetError as error:
            warn(str(error))
    return targets


def _as_json(version: ModelVersion) -> dict[str, Any]:
    fields = asdict(version) | {"folder": str(version.folder)}
    return {"reference": version.reference, "name": fields.pop("name"), "version": fields.pop("number"), **fields}


def _origin(version: ModelVersion) -> str:
    return str(version.folder) if version.run is None else f"{version.run}@{version.step}"


def _format_time(seconds: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="minutes")
