"""Models: registered, revised, retired, inspected; and the settings file, applied as a difference."""

from collections.abc import Iterable

from controlplane.commands import (
    ApplySettings,
    RegisterModel,
    ReportModel,
    ReportUnusable,
    RetireModel,
    ReviseModel,
)
from controlplane.decisions import timers
from controlplane.decisions.admission import known
from controlplane.decisions.draft import Draft
from controlplane.decisions.lifecycle import set_back
from controlplane.decisions.needs import cannot_fit, never_fits
from controlplane.decisions.schedule import advance
from controlplane.decisions.verdict import give_up, reject
from controlplane.events import (
    ConfigurationFound,
    ModelCleared,
    ModelInspected,
    ModelRegistered,
    ModelRetired,
    ModelRevised,
    NodeLimitsChanged,
    Revision,
    SettingsApplied,
)
from controlplane.fleet.members import Model
from controlplane.fleet.state import Fleet
from controlplane.refusal import Code, Refused
from controlplane.spec import ModelSpec

HARD = ("source", "engine", "arguments", "gpus")
"""Fields that make another set of weights or another skeleton; the rest counts at once."""
SOFT = ("cells", "idle", "aliases", "note")


def register(draft: Draft, command: RegisterModel) -> None:
    spec = command.spec
    if (other := draft.fleet.models.get(spec.name)) is not None and not other.retired:
        cure = f"change it with PUT /api/models/{spec.name}, or where it is written in the settings file; or remove it first"
        raise Refused(Code.MODEL_EXISTS, f"a model called {spec.name} exists; {cure}", model=spec.name)
    check_names([m.spec for m in _live(draft.fleet)] + [spec])
    _check_fits(draft, spec)
    _register(draft, spec, "api")


def revise(draft: Draft, command: ReviseModel) -> None:
    model = known(draft.fleet, command.spec.name)
    if model.model != command.spec.name:
        raise Refused(Code.MODEL_UNKNOWN, f"{command.spec.name} is an alias of {model.model}; revise that", model=model.model)
    if not difference(model.spec, command.spec):
        return
    check_names([m.spec for m in _live(draft.fleet) if m.model != model.model] + [command.spec])
    _check_fits(draft, command.spec)
    _revise(draft, model, command.spec, over_settings=model.origin == "settings")
    advance(draft)


def retire(draft: Draft, command: RetireModel) -> None:
    """No new requests; waiting ones end, running ones finish, then what served it descends."""
    model = draft.fleet.resolve(command.model)
    if model is not None and model.retired:
        return
    model = known(draft.fleet, command.model)
    _retire(draft, model, over_settings=model.origin == "settings")
    timers.retire(draft)
    advance(draft)


def apply_settings(draft: Draft, command: ApplySettings) -> None:
    """Make the models of origin `settings` those of the file. All is checked before anything changes."""
    fleet, wanted = draft.fleet, {spec.name: spec for spec in command.models}
    live = {m.model: m for m in _live(fleet)}
    for name in wanted:
        if name in live and live[name].origin != "settings":
            message = f"{command.path} names {name}, which was registered over the API; retire that one or rename this one"
            raise Refused(Code.MODEL_EXISTS, message, model=name)
    check_names([*command.models, *(m.spec for m in live.values() if m.origin != "settings")])
    gone = sorted((m for m in live.values() if m.origin == "settings" and m.model not in wanted), key=lambda m: m.model)
    added = [spec for spec in command.models if spec.name not in live]
    revised = [(live[s.name], s) for s in command.models if s.name in live and difference(live[s.name].spec, s)]
    limits = _limits(fleet, command)
    if not (gone or added or revised or limits):
        return
    for spec in [*added, *(spec for _, spec in revised)]:
        _check_fits(draft, spec, settings=True)
    fields = tuple(Revision(model.model, difference(model.spec, spec)) for model, spec in revised)
    for model in gone:
        _retire(draft, model)
    for model, spec in revised:
        _revise(draft, model, spec)
    for spec in added:
        _register(draft, spec, "settings")
    if limits:
        draft.emit(NodeLimitsChanged(node=command.node, before=fleet.nodes[command.node].limits, after=command.limits))
    draft.emit(
        SettingsApplied(
            path=command.path, digest=command.digest, added=tuple(s.name for s in added), revised=fields,
            retired=tuple(m.model for m in gone), unchanged=len(wanted) - len(added) - len(revised), limits=limits,
        )
    )  # fmt: skip
    timers.retire(draft)
    advance(draft)


def _limits(fleet: Fleet, command: ApplySettings) -> tuple[str, ...]:
    """Which of the node's limits the file changes. A node that has not joined yet brings them with its hello."""
    node = fleet.nodes.get(command.node)
    if node is None:
        return ()
    fields = type(command.limits).__struct_fields__
    return tuple(field for field in fields if getattr(node.limits, field) != getattr(command.limits, field))


def difference(before: ModelSpec, after: ModelSpec) -> tuple[str, ...]:
    """The fields in which two specs of one name differ."""
    return tuple(field for field in (*HARD, *SOFT) if getattr(before, field) != getattr(after, field))


def check_names(specs: Iterable[ModelSpec]) -> None:
    """Every name and alias means one model. Raises Refused with the name and both models."""
    owners: dict[str, str] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if name in owners:
                message = f"{name!r} would mean two models: {owners[name]} and {spec.name}"
                raise Refused(Code.MODEL_EXISTS, message, name=name, models=[owners[name], spec.name])
            owners[name] = spec.name


def inspected(draft: Draft, report: ReportModel) -> None:
    """A node opened the source. From now on the model can be placed, or is rejected with both numbers."""
    model = _reported(draft.fleet, report)
    if model.facts == report.facts:
        return
    draft.emit(ModelInspected(model=model.model, revision=model.revision, inspected_by=report.node, facts=report.facts))
    if report.facts.configuration not in draft.fleet.configurations:
        draft.emit(
            ConfigurationFound(
                configuration=report.facts.configuration, engine=report.engine, architecture=report.facts.architecture,
                arguments=report.arguments,
            )
        )  # fmt: skip
    if model.set_back is not None:
        draft.emit(ModelCleared(model=model.model))
    model = draft.fleet.models[model.model]
    if (unfit := cannot_fit(draft.fleet, model)) is not None:
        reject(draft, model, Code.CANNOT_FIT, unfit.message(model.model), unfit)
    advance(draft)


def unusable(draft: Draft, report: ReportUnusable) -> None:
    """A node can't read the source: for good, or for now (then the model backs off and is inspected again)."""
    model = _reported(draft.fleet, report)
    if report.final:
        if model.rejection is None:
            reject(draft, model, report.code or Code.MODEL_UNUSABLE, report.message)
    elif model.set_back is None or model.set_back.retry_at_ms <= draft.now:
        set_back(draft, model.model, model.revision, code=report.code, message=report.message)
    advance(draft)


def _reported(fleet: Fleet, report: ReportModel | ReportUnusable) -> Model:
    model = fleet.models.get(report.model)
    if model is None or model.retired or model.revision != report.revision:
        raise Refused(Code.STALE, f"revision {report.revision} of {report.model} is not its current one", model=report.model)
    return model


def _live(fleet: Fleet) -> list[Model]:
    return [model for model in fleet.models.values() if not model.retired]


def _check_fits(draft: Draft, spec: ModelSpec, *, settings: bool = False) -> None:
    """`settings`: they are read before this start's devices are known; a kind that is missing then is told at inspection."""
    unfit = never_fits(draft.fleet, Model(model=spec.name, spec=spec, revision=0, origin="", registered_ms=0))
    if unfit is not None and unfit.where in ("gpu", "cpu"):
        if settings:
            return
        raise Refused(Code.NOT_AVAILABLE, unfit.message(spec.name), model=spec.name, param="engine")
    if unfit is not None:
        numbers = {"need_bytes": unfit.need_bytes, "limit_bytes": unfit.limit_bytes}
        raise Refused(Code.CANNOT_FIT, unfit.message(spec.name), model=spec.name, **numbers)


def _register(draft: Draft, spec: ModelSpec, origin: str) -> None:
    before = draft.fleet.models.get(spec.name)
    draft.emit(ModelRegistered(model=spec.name, spec=spec, revision=before.revision + 1 if before else 1, origin=origin))


def _revise(draft: Draft, model: Model, spec: ModelSpec, *, over_settings: bool = False) -> None:
    """Only a hard difference makes a new revision: facts, weights and instances belong to one."""
    fields = difference(model.spec, spec)
    hard = any(field in HARD for field in fields)
    draft.emit(
        ModelRevised(
            model=model.model, spec=spec, revision=model.revision + hard, fields=fields, hard=hard, over_settings=over_settings
        )
    )  # fmt: skip


def _retire(draft: Draft, model: Model, *, over_settings: bool = False) -> None:
    draft.emit(ModelRetired(model=model.model, over_settings=over_settings))
    give_up(draft, model, Code.MODEL_RETIRED, f"{model.model} was retired while this waited")
