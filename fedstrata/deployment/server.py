"""A run over real sites, from its beginning or from its last committed round to its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedstrata import files
from fedstrata.callbacks import Listener, RoundView
from fedstrata.data import datasets, parse_transforms
from fedstrata.data.channels import Statistics, with_statistics
from fedstrata.data.transforms import OTHER_WAYS, normalisation_in
from fedstrata.deployment.agreement import Agreement, NotBegun
from fedstrata.deployment.audit import AUDIT_FILE, AuditLog
from fedstrata.deployment.begun import DEPLOYMENT_FILE, Begun, write_begun
from fedstrata.deployment.declarations import SUMS, Schema, declared_data
from fedstrata.deployment.describing import rules_in_words, site_rules_in_words, what_is_refused, what_leaves_a_site
from fedstrata.deployment.engine import ENGINE, NetworkEngine, deployed_anywhere, global_test
from fedstrata.deployment.federation import FAILED, FINISHED, STOPPED, Federation, Network, Standing
from fedstrata.deployment.pooling import agree
from fedstrata.deployment.releases import RELEASES_FOLDER, Releases
from fedstrata.deployment.rules import EXACT_BITS, Rules, refuse_matrices
from fedstrata.deployment.server_audit import ServerAudit
from fedstrata.diagnostics.choosing import choose, lacking
from fedstrata.diagnostics.contract import Need
from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.planning import Plan
from fedstrata.engines.proxy import server_proxy
from fedstrata.engines.server import ServerSide
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Declared, Method
from fedstrata.plugins import require_imports
from fedstrata.runs.devices import DTYPES
from fedstrata.runs.diagnosing import Diagnosis
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients, load_data, make_setting, prepare, refuse_misfits
from fedstrata.runs.same_data import refuse_other_data
from fedstrata.runs.signals import Interrupted
from fedstrata.scores import make_metrics
from fedstrata.wire import AS_IS

if TYPE_CHECKING:
    from fedstrata.deployment.secure.rounds import SecureRounds

MASKED_SUM_FILE = "masked-sum.bin"


@dataclass(frozen=True)
class Deployment:
    """What a server is to do, and with whom.

    In a ``rehearsal`` the server has the data too, and tests the global model on the global test set.
    """

    experiment: Experiment
    names: Sequence[str]
    out: Path
    rules: Rules = field(default_factory=Rules)
    rehearsal: bool = False
    ingredients: Ingredients = field(default_factory=Ingredients)
    removed: Sequence[str] = ()
    """Those of the names that take part no more; they keep their numbers."""
    traffic: Callable[[], Mapping[str, float]] = dict
    """What the network has carried so far, in bytes, under the names of metrics."""
    audit: ServerAudit | None = None
    """Where it is written down what happens; by default in the run folder."""

    @cached_property
    def method(self) -> Method:
        """The method that is run."""
        return self.ingredients.make_method(self.experiment)

    @property
    def experiment_of_sites(self) -> Experiment:
        """The experiment as it is run: the sites are the clients, and every round is committed."""
        return self.experiment.with_changes({"checkpoint_every": 1, "clients": len(self.names)})

    def begun(self) -> Begun | None:
        """Find the run in ``out`` to go on with, if one was begun; a folder that holds something else is refused."""
        begun = Begun.find(self.out, self.names, self.ingredients.describe(self.experiment_of_sites))
        if begun is None:
            RunFolder.refuse_taken(self.out)
        return begun

    def check(self) -> None:
        """Refuse what cannot run over a network, before anybody connects."""
        self.rules.check(len(self.names) - len(self.removed))
        require_imports(self.experiment.imports)
        method = self.method
        refuse_misfits(self.experiment, method)
        refuse_matrices(make_metrics(self.experiment.metrics or ()))
        choose(self.experiment.diagnose, lacking(self._unseen()))
        if method.needs.proxy and not self.rehearsal:
            raise FedStrataError(
                f"'{method}' needs labelled samples at the server, which a server of real sites does not have; "
                "it runs in simulation, and in a rehearsal."
            )
        if self.experiment.validation_fraction:
            raise FedStrataError(
                f"validation_fraction = {self.experiment.validation_fraction:g} is not offered on real sites, which "
                "keep the model of the last round; leave it out."
            )
        if self.experiment.validation:
            raise FedStrataError(
                f"validation = {self.experiment.validation} needs labelled samples at the server, which a server of "
                "real sites does not have; leave it out."
            )
        objection = method.objection_to_real_sites
        if objection is not None:
            raise FedStrataError(f"{objection}; choose another method.")
        self._check_private()
        if self.rules.secure:
            self._check_secure()

    def _unseen(self) -> dict[Need, str]:
        """Tell what diagnostics cannot look at, and why."""
        unseen = {
            need: f"it looks at {need.value}, which would have to leave the sites" for need in (Need.MODELS, Need.DATA)
        }
        if self.rules.secure:
            unseen[Need.UPLOADS] = f"it looks at {Need.UPLOADS.value}, of which secure aggregation shows only the sum"
        elif self.method.answering_for_privacy is not None:
            unseen[Need.UPLOADS] = (
                f"it looks at {Need.UPLOADS.value}, and the account of '{self.method.answering_for_privacy}' does not "
                "cover what it tells of them"
            )
        return unseen

    def _check_secure(self) -> None:
        """Refuse a method that cannot do with the sum of all uploads, and too few sites."""
        objection = self.method.objection_to_secure_aggregation
        if objection is not None:
            raise FedStrataError(
                f"'{self.method}' cannot run with secure aggregation: {objection}. Run it without, or choose another "
                "method."
            )
        objection = self.method.objection_to_rounding
        if objection is not None and self.rules.secure_bits < EXACT_BITS:
            raise FedStrataError(
                f"'{self.method}' cannot run with secure_bits = {self.rules.secure_bits}: {objection}. "
                f"Set it to {EXACT_BITS}."
            )
        if self.experiment.upload_values != AS_IS:
            raise FedStrataError(
                f"Under secure aggregation uploads are masked whole numbers, not {self.experiment.upload_values}; "
                "leave upload_values as it is, and set 'secure_bits' in the rules instead."
            )
        there = len(self.names) - len(self.removed) - self.experiment.late_clients
        self.rules.check_secure(int(self.experiment.participation * there + 0.5))

    def describe(self) -> dict[str, Any]:
        """Tell what would be run, checked as far as it can be without the sites.

        Where the server can load the data itself, the model is built for it, and its size is told.
        """
        self.check()
        experiment = self.experiment.with_changes({"clients": len(self.names)})
        imports = experiment.imports
        told = {
            "method": experiment.method,
            "model": experiment.model,
            "rounds": experiment.rounds,
            "leaves_a_site": what_leaves_a_site(self.rules, self._adds_sums_up(), self._surveying()),
            "rules": rules_in_words(self.rules),
            "every_site_decides": site_rules_in_words(),
            "refused": what_is_refused(self.rules),
            **({"imports": [f"{text}, which every site must import too" for text in imports]} if imports else {}),
            **({"secure_aggregation": self._secrecy()} if self.rules.secure else {}),
        }
        try:
            dataset = load_data(experiment) if self.ingredients.dataset is None else self.ingredients.dataset
        except FedStrataError:
            return {**told, "data": f"{experiment.data}, which is not on this machine; the sites will declare theirs"}
        _, setting = make_setting(
            experiment, self.method, self.ingredients, dataset.input_shape, dataset.classes, dataset.trial
        )
        sent = sum(setting.initial[name].nbytes for name in setting.shared)
        summed = self.method.objection_to_summing is None  # then a sum in double precision stands for all replies
        copies = 6 if summed else len(self.names) + 5
        return {
            **told,
            "data": f"{experiment.data}: {list(dataset.input_shape)}, {dataset.classes} classes",
            "parameters": sum(setting.initial[name].numel() for name in setting.layers.parameter_names),
            "bytes_per_site_and_round": f"at most {sent} each way, beside what the method adds",
            "stays_at_sites": sorted(setting.personal) or "nothing of the model",
            "memory": f"about {copies * sent} bytes at the server",
        }

    def _secrecy(self) -> str:
        """Tell what the server sees under secure aggregation, and what it still sees of single sites."""
        surveying = self._surveying()
        surveys = f", and the answers to the surveys of {' and '.join(surveying)}" if surveying else ""
        told = "losses, scores and costs of single sites stay in the clear"
        return f"of uploads the server sees only sums; {told}{surveys}"

    def _surveying(self) -> list[str]:
        return [f"'{part.name}'" for part in self.method.parts if part.exchanges()]

    def run(
        self,
        network: Network,
        listener: Listener | None = None,
        watch: Callable[[Standing], None] = lambda standing: None,
        log: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Any]:
        """Begin the run in ``out``, or go on with the one that was begun there; return its summary."""
        self.check()
        if not (self.out / DEPLOYMENT_FILE).exists():
            RunFolder.refuse_taken(self.out)
        files.make_folder(self.out)
        lock = files.WriteLock(self.out)  # before anybody is greeted: another server may be at work there
        try:
            return self._run(network, listener, watch, log, lock)
        finally:
            lock.release()

    def _run(
        self,
        network: Network,
        listener: Listener | None,
        watch: Callable[[Standing], None],
        log: Callable[[str], None],
        lock: files.WriteLock,
    ) -> dict[str, Any]:
        experiment, begun = self.experiment_of_sites, self.begun()
        audit = self.audit or ServerAudit(AuditLog(self.out / AUDIT_FILE), self.names)
        federation = Federation(
            network=audit.over(network),
            names=self.names,
            rules=self.rules,
            run=secrets.token_hex(8) if begun is None else begun.run,
            session=secrets.token_hex(8),
            experiment=experiment,
            committed=0 if begun is None else begun.committed,
            begins=begun is None,
            agreement=Agreement(
                None if begun is None else begun.schema,
                None if begun is None else begun.normalises_by,
                self.rules.class_names,
                self.rules.shape,
            ),
            statistics=None if begun is None else begun.statistics,
            log=log,
            watch=watch,
            note=audit.note,
        )
        audit.start(federation.run, experiment, self.rules, federation.committed)
        for name in self.removed:
            federation.remove(self.names.index(name))
        try:
            return self._rounds(experiment, federation, begun, listener, audit, lock)
        except Interrupted as stop:
            federation.end(STOPPED, f"the server was stopped after round {stop.round}, and can go on from there")
            raise
        except NotBegun as error:
            federation.end(STOPPED, f"the run has not begun: {error}")
            raise
        except FedStrataError as error:
            federation.end(FAILED, f"the server has given the run up: {error}")
            raise
        finally:
            log(str(audit.log))

    def _rounds(
        self,
        experiment: Experiment,
        federation: Federation,
        begun: Begun | None,
        listener: Listener | None,
        audit: ServerAudit,
        lock: files.WriteLock,
    ) -> dict[str, Any]:
        log = federation.log
        driver = self._prepare(experiment, federation)
        folder = self._begin(driver, federation, lock) if begun is None else RunFolder.resume(self.out, lock)
        with folder:
            if begun is not None and self.rehearsal:
                refuse_other_data(folder, driver.dataset, driver.split)
            if begun is None and federation.statistics is not None:
                federation.open()  # again: now all sites hear by what they normalise, which is on disk here
            log(f"the run {federation.run} {'begins' if begun is None else f'goes on after round {begun.committed}'}")
            if self.rules.secure:
                log(self._secrecy())
            driver.restore(folder)
            own = (self._noting(driver, federation), audit.committed(lambda: driver.model))
            summary = driver.run(folder, [*own, *([] if listener is None else [listener])])
            (self.out / MASKED_SUM_FILE).unlink(missing_ok=True)
            Releases(self.out / RELEASES_FOLDER).drop()
            federation.end(FINISHED, f"the run is finished, after {experiment.rounds} rounds")
            return summary

    def _prepare(self, experiment: Experiment, federation: Federation) -> Driver:
        """Greet the sites, and build what the rounds need."""
        own = self.ingredients.with_secret()
        ready = prepare(experiment, own) if self.rehearsal else None
        if ready is not None:
            federation.agreement = replace(federation.agreement, schema=Schema.of(ready.dataset))
        declarations = federation.open()
        statistics = self._statistics(federation)
        if ready is not None and statistics is not None:
            ready = ready.with_statistics(statistics)
        if ready is None:
            assert federation.schema is not None
            schema = federation.schema
            dataset, split = declared_data(experiment.data, schema, declarations, len(self.names))
            dataset = dataset if statistics is None else with_statistics(dataset, statistics)
            network, setting = make_setting(
                experiment, self.method, own, schema.input_shape, len(schema.class_names), schema.trial
            )
            declared = Declared(torch.from_numpy(split.sizes), torch.from_numpy(split.label_counts(dataset)))
            side, test = ServerSide(setting, declared), None
            data = DeviceData(dataset, split, (), setting.device, DTYPES[experiment.precision])
        else:
            dataset, split, setting, network = ready.dataset, ready.split, ready.setting, ready.model
            proxy = server_proxy(setting, LoopForward(ready.model, setting.head), ready.data)
            side, test = ServerSide(setting, ready.declared, proxy), global_test(ready)
            data = ready.data
        deployed = deployed_anywhere(setting, network, data)
        return Driver(
            experiment=self.ingredients.describe(experiment),
            dataset=dataset,
            split=split,
            setting=setting,
            engine=NetworkEngine(side, federation, test, deployed, self._secure_rounds(federation), self._releases()),
            plan=Plan(ENGINE, 1, torch.get_num_threads()),
            network=network,
            diagnosis=Diagnosis.of(experiment.diagnose, setting, self._unseen()),
        )

    def _statistics(self, federation: Federation) -> Statistics | None:
        """Tell by what the sites normalise: their datasets' constants, or what their sums tell, found out once."""
        by = federation.agreement.normalises_by
        if isinstance(by, Statistics):
            return by
        if by == SUMS and federation.statistics is None:
            self._refuse_private_sums()
            assert federation.schema is not None
            secure = None
            if self.rules.secure:
                from fedstrata.deployment.secure.server import SecureAggregation

                secure = SecureAggregation(federation)
            federation.statistics = agree(federation, federation.schema.input_shape[0], secure)
        return federation.statistics

    def _refuse_private_sums(self) -> None:
        """Refuse to have exact sums of samples leave the sites under a method that promises how little leaves them."""
        part = self.method.answering_for_privacy
        if part is not None:
            raise FedStrataError(
                f"'{part}' keeps an account of all that leaves a site, but for 'normalise' the exact sums of its "
                f"samples would leave it. Choose other transforms: {OTHER_WAYS}."
            )

    def _check_private(self) -> None:
        """Refuse private sums before anybody connects, unless the data has published constants."""
        if self.method.answering_for_privacy is not None and self._adds_sums_up():
            self._refuse_private_sums()

    def _adds_sums_up(self) -> bool:
        """Tell whether mean and deviation must be found by adding up, as far as one can know without the sites."""
        normalisation = normalisation_in(parse_transforms(self.experiment.transforms))
        if normalisation is None or not normalisation.of_everybody:
            return False
        own = self.ingredients.dataset
        return own.estimated if own is not None else datasets.make(self.experiment.data).statistics is None

    def _secure_rounds(self, federation: Federation) -> SecureRounds | None:
        if not self.rules.secure:
            return None
        from fedstrata.deployment.secure.rounds import SecureRounds
        from fedstrata.deployment.secure.server import SecureAggregation

        return SecureRounds(SecureAggregation(federation, self.out / MASKED_SUM_FILE))

    def _releases(self) -> Releases | None:
        """Keep models before they leave where a method answers for privacy; elsewhere they can be merged again."""
        return None if self.method.answering_for_privacy is None else Releases(self.out / RELEASES_FOLDER)

    def _begin(self, driver: Driver, federation: Federation, lock: files.WriteLock) -> RunFolder:
        folder = RunFolder.create(self.out, driver.experiment, driver.dataset, driver.split, driver.environment(), lock)
        write_begun(self.out, federation, self.rehearsal)
        return folder

    def _noting(self, driver: Driver, federation: Federation) -> Listener:
        """Note with every round what the network has carried for it, and if sites have gone on without their state."""
        before = dict(self.traffic())

        def note(update: RoundView) -> None:
            carried = dict(self.traffic())
            driver.metrics.add_round(update.round, {name: carried[name] - before.get(name, 0.0) for name in carried})
            driver.metrics.add_round(update.round, federation.last_steps.metrics())
            before.update(carried)

        return note
