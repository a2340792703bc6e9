"""The default solver: fast methods first, then proof and search at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import TIMEOUT_MAX

from scheduler.errors import UnsuitableProblemError
from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order
from scheduler.simulator import simulate
from scheduler.solution import Proposal, relative_gap
from scheduler.solvers.anneal import solver as anneal
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.dp.costs import chain_costs
from scheduler.solvers.dp.one_cut_bound import one_cut_bound
from scheduler.solvers.eviction_walk import EvictionWalks
from scheduler.solvers.hierarchical.time_segments import NEAR
from scheduler.solvers.ilp import solver as ilp
from scheduler.solvers.incumbent import Incumbent
from scheduler.solvers.kernels import with_fitting_kernels
from scheduler.solvers.late_order import in_late_order
from scheduler.solvers.live_sets import MOST_OPERATIONS, floor_of_live_sets
from scheduler.solvers.neighborhoods import search as neighborhoods
from scheduler.solvers.registry import Propose, load_solver
from scheduler.solvers.smallest_peak import Smallest, smallest_peak, squeeze


@dataclass(frozen=True)
class AutoSettings:
    """When `auto` uses which solver, and for how long.

    Attributes
    ----------
    slow_start : float
        If the known schedules take more than so many times the plain step, a walk looks for a faster one first.
    quick_solvers : tuple of str
        Solvers that answer in milliseconds to seconds.
    uncompiled_solvers, uncompiled_chain_solvers : tuple of str
        Solvers that answer as quickly without compiled kernels, for graphs and for chains.
    few_programs : int
        Number of first integer programs of `ilp`, if a gap is enough.
    few_programs_share : float
        Share of the remaining time for them.
    hierarchical_operations : int
        From so many operations on, `hierarchical` runs if `ilp` has not finished alone.
    hierarchical_first_operations : int
        From so many operations on, `hierarchical` runs first.
    hierarchical_only_operations : int
        From so many operations on, no other solver runs if `hierarchical` finds a schedule.
    quick_share : float
        Share of the remaining time for each of the quick solvers: after that, they find little.
    quick_gap : float
        Where `hierarchical` ran first and left at most this gap, quick solvers, which then take long, do not run.
    first_round_share : float
        Share of the time limit for everything but the last search.
    smallest_peak_share : float
        Share of that time for the smallest peak where nothing fits so far.
    nearly_fits : float
        A schedule nearly fits if it exceeds the budget by at most this share of it, without what is resident.
    small_operations : int
        A graph of fewer operations is small: `anneal` soon finds little in it, `ilp` and `neighborhoods` still do.
    neighborhoods_seconds : float
        With so much time, the last search includes `neighborhoods`.
    last_share, small_last_share : float
        Share of the time for such a last search, and in a small graph.
    long_proof_gap, small_proof_gap : float
        `ilp` goes on in that search if the gap over all orders is larger than this, and in a small graph.
    small_anneal_share : float
        If it does, share of that search for `anneal` in a small graph; `neighborhoods` have the rest. In others
        `anneal` has all of it.
    nothing_fits_share : float
        Share of the last search where nothing fits so far; then the smallest peak has the rest.
    hierarchical_share : float
        Share of the remaining time for `hierarchical` if it does not run first.
    bound_first_share : float
        Share of the remaining time for the first bound of `ilp`, where that comes before searches beside
        `hierarchical`.
    ilp_alone_seconds, ilp_alone_share : float
        `ilp` runs alone for the shorter one of these; it usually needs no more.
    two_walkers_seconds : float
        With less time left, `anneal` uses one thread, so that `ilp` has a core of its own.
    anneal_again_gap : float
        Where `anneal` gives up with a larger gap over all orders, it starts again.
    other_orders_least_seconds : float
        Least time for schedules outside the search space of an answer that is optimal in it.
    other_orders_ratio, other_orders_gain : float
        Further time for them, as a multiple of the time until that answer was proven, where another
        schedule may save this share of the step's time; in proportion where it may save more or less.
    other_orders_least_gain : float
        Where it may save less than this share, none is searched for.
    """

    slow_start: float = 1.5
    quick_solvers: tuple[str, ...] = ("save-all", "greedy", "segments")
    uncompiled_solvers: tuple[str, ...] = ("save-all", "segments")
    uncompiled_chain_solvers: tuple[str, ...] = ("save-all", "segments", "greedy-segments")
    few_programs: int = 4
    few_programs_share: float = 0.4
    hierarchical_operations: int = 500
    hierarchical_first_operations: int = 3_000
    hierarchical_only_operations: int = 30_000
    quick_share: float = 0.15
    quick_gap: float = 0.05
    first_round_share: float = 0.9
    smallest_peak_share: float = 0.3
    nearly_fits: float = NEAR
    small_operations: int = 300
    neighborhoods_seconds: float = 8.0
    last_share: float = 0.25
    small_last_share: float = 0.4
    long_proof_gap: float = 0.03
    small_proof_gap: float = 0.005
    small_anneal_share: float = 0.5
    nothing_fits_share: float = 0.3
    hierarchical_share: float = 0.2
    bound_first_share: float = 0.5
    ilp_alone_seconds: float = 4.0
    ilp_alone_share: float = 0.4
    two_walkers_seconds: float = 25.0
    anneal_again_gap: float = 0.01
    other_orders_least_seconds: float = 1.0
    other_orders_ratio: float = 2.0
    other_orders_gain: float = 5e-3
    other_orders_least_gain: float = 1e-4


SETTINGS = AutoSettings()
_SECONDS_PER_LOOK = 0.02
"""So often the clock is read while another thread searches: it may be paused."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best answer of several solvers, with the best bounds of all of them.

    The stages are in `STAGES`; `print(*STAGES, sep="\\n")` shows them. If an answer within a gap
    is enough, methods that need no compiled kernels come first, with a few integer programs
    for the bound unless it is a chain. Chains go to `dp` next. Otherwise the quick methods give
    a first answer, and `ilp` proves it or finds a better one. Where a gap remains,
    `hierarchical` and `anneal` search as well, and at last integer programs over neighborhoods
    of the best schedule. All of them get the graph without kernels that never fit (`kernels`), and
    if another order is allowed, in the late order (`late_order`), in which most schedules are
    faster. Deep networks go to `hierarchical` first, which is the last stage if it proves its
    answer; once it says that nothing fits so far, walks and `ilp` run beside it, and `anneal` goes
    on from what nearly fits.

    Guarantee: never worse than its parts in the time that each has, and a schedule wherever
    `minimum_budget` knows one. Search space: that of the part that found the answer. When:
    always. Cost: the time limit, or less if the answer is proven. Memory: at most 768 MiB and
    8 KiB an operation.
    """
    problem = with_fitting_kernels(problem)
    with ThreadPoolExecutor(2) as pool:
        policy = _Policy(problem, deadline, seed, SETTINGS, pool)
        try:
            for stage in STAGES:
                stage.act(policy)
                if policy.ended:
                    break
        finally:
            policy.stop_proof()
    return policy.best.proposal()


class _Policy:
    """The policy on one problem: which solver runs when, and for how long.

    Attributes
    ----------
    late : Problem
        The problem as solvers get it: in the late order, unless another order is out of the question.
    deadline : Deadline
        The time limit; earlier once the answer of `dp` is optimal in its search space.
    first_round : Deadline
        The deadline of everything but the last search.
    until_fitting : Deadline
        The same, stopped once a schedule fits: for what looks for one beside other solvers.
    answers : list of Schedule
        What solvers have answered, for those that search from several known schedules.
    exceeding : dict of function to tuple of Schedule
        What `ilp`, and in a large graph `hierarchical`, has found last that does not fit, for the same purpose.
    solves_neighborhoods : bool
        Whether the last search includes integer programs over neighborhoods of the best schedule.
    ended : bool
        Whether the remaining stages are skipped.
    """

    def __init__(
        self, problem: Problem, deadline: Deadline, seed: int, settings: AutoSettings, pool: ThreadPoolExecutor
    ) -> None:
        self.problem, self.seed, self.settings, self.pool = problem, seed, settings, pool
        self.late = in_late_order(problem)
        orders = {"input order": problem.graph}
        if self.late is not problem:
            orders["late order"] = self.late.graph
        self.best = Incumbent(problem, orders)
        self.answers: list[Schedule] = []
        self.exceeding: dict[Propose, tuple[Schedule, ...]] = {}
        self.deadline = deadline
        self.solves_neighborhoods = deadline.remaining >= settings.neighborhoods_seconds and neighborhoods.suits(
            problem.graph
        )
        last_share = settings.small_last_share if self._is_small else settings.last_share
        share = 1 - last_share if self.solves_neighborhoods else settings.first_round_share
        self.first_round = self._share_of(deadline, share)
        self.until_fitting = self.first_round.within(math.inf)
        self.ended = False
        self._smallest: Smallest | None = None
        """What `find_smallest_peak` has found."""
        self._annealing: Deadline | None = None
        """That of annealing which began before anything fitted."""
        self._programs: ilp.ProgramSearch | None = None
        """The search of `ilp`, if its bound came first."""
        self._proof: Future[None] | None = None
        self._proof_limit = self.first_round
        self._started = clock.now()
        self._other_orders_end = math.inf

    def try_known_schedules(self) -> None:
        """Take over the best of the schedules that the problem comes with."""
        for schedule in self.problem.starts:
            if self.problem.reorder or follows_input_order(self.problem.graph, schedule):
                self.best.offer(schedule)

    def walk_within_budget(self) -> None:
        """Walk within the budget if the known schedules are slow, as those for smaller budgets can be.

        It does so however little time is left; then it ends with the first walk that fits.
        """
        if self.settings.slow_start * self.problem.baseline.time < self.best.time < math.inf:
            for graph in self._orders:
                self._walk(graph, self.first_round)

    def answer_quickly(self) -> None:
        """Look for an answer within the problem's gap by methods that need no compiled kernels."""
        settings, is_chain = self.settings, self.problem.chain is not None
        if not self.problem.gap:
            return
        if is_chain:
            self._consult(_bound_chain, self.first_round)
        for name in settings.uncompiled_chain_solvers if is_chain else settings.uncompiled_solvers:
            self._ask(name, self.first_round)
        if not is_chain:  # for a chain, `dp` takes less time than the programs
            self._consult(_solve_few_programs, self.first_round, settings.few_programs_share)

    def solve_chain(self) -> None:
        """Run `dp` on a chain, and end if no schedule can be noticeably faster.

        Of a long chain, the answer may be so near to the bound without being proven optimal.
        """
        if self.problem.chain is not None:
            self._ask("dp", self.deadline, share=self.settings.first_round_share)
            self.ended = self._possible_gain <= self.settings.other_orders_least_gain
            self.deadline = self._for_other_orders(self.deadline)
            self.first_round = self._share_of(self.deadline, self.settings.first_round_share)

    def solve_deep_network(self) -> None:
        """Run `hierarchical` on a large graph, and end if it proves its answer.

        Once it says that nothing fits so far, walks and `ilp` run at the same time.
        """
        if self._is_deep:
            self._ask("hierarchical", self.first_round)
            operations = len(self.problem.graph.operations)
            enough = self.best.is_optimal or operations >= self.settings.hierarchical_only_operations
            self.ended = self.best.schedule is not None and enough

    def try_quick_solvers(self) -> None:
        """Run the quick solvers, and walks that evict when memory is short, unless `hierarchical` has done better.

        In a large graph they take seconds, and two of them run at the same time.
        """
        if self._proof is None and not (self._is_deep and self.best.gap <= self.settings.quick_gap):
            run = self.pool.map if self._is_deep else map
            list(run(_call, self._quick_searches(self.first_round)))

    def _search_beside(self) -> None:
        """Do the same beside `hierarchical`, the last ones first, and then look for the smallest peak.

        All of it ends once a schedule fits. If it is from here, annealing begins anew with that one too.
        """
        for search in reversed(self._quick_searches(self.until_fitting)):
            if self.best.schedule is None:
                search()
        self._find_smallest_peak(self.until_fitting)
        smallest = [self._smallest.schedule] if self._smallest is not None else []
        found = [*self.answers, *smallest]
        if self._annealing is not None and any(schedule is self.best.schedule for schedule in found):
            self._annealing.stop()

    def _quick_searches(self, deadline: Deadline) -> Sequence[Callable[[], None]]:
        settings = self.settings
        solvers = (partial(self._ask, name, deadline, settings.quick_share) for name in settings.quick_solvers)
        return [*solvers, *(partial(self._walk_in_time, graph, deadline) for graph in self._orders)]

    def find_smallest_peak(self) -> None:
        """Look for the smallest peak if no schedule fits so far, unless that has been done beside `hierarchical`."""
        if self._proof is None:
            self._find_smallest_peak(self.first_round)

    def _find_smallest_peak(self, deadline: Deadline) -> None:
        if self.best.schedule is None and not self.best.is_final:
            limit = self._share_of(deadline, self.settings.smallest_peak_share)
            self._smallest = smallest_peak(self.problem, limit)
            self.best.offer(self._smallest.schedule)
            if self.best.schedule is None:
                self._refute(deadline)

    def _refute(self, deadline: Deadline) -> None:
        """Prove, if possible, that no schedule fits: then nothing else needs to be searched."""
        least = self.problem.budget_bytes + 1
        floor = floor_of_live_sets(self.problem.graph, deadline, enough_bytes=least)
        if floor is not None and floor.bytes >= least:
            self.best.update(Proposal(None, "any order", infeasible=True))

    def prove_and_search(self) -> None:
        """Run `ilp` alone; if that takes long, or `hierarchical` has run before, other searches at the same time.

        `ilp` goes on if the gap stays large.
        """
        settings, limit, pool = self.settings, self.first_round, self.pool
        operations = len(self.problem.graph.operations)
        has_begun = self._proof is not None
        if not has_begun:
            self._begin_proof()
        assert self._proof is not None
        alone = min(settings.ilp_alone_seconds, settings.ilp_alone_share * limit.remaining)
        wait([self._proof], timeout=0.0 if self._is_deep else alone)
        if not self._proof.done():
            deep = settings.hierarchical_operations <= operations < settings.hierarchical_first_operations
            if self.problem.chain is None and deep:
                self._ask("hierarchical", limit, share=settings.hierarchical_share)
            # Where nothing fitted in a large graph, `ilp` has begun; it hardly raises its first bound there.
            has_core = has_begun or limit.remaining >= settings.two_walkers_seconds
            walkers = anneal.WALKERS if has_core else 1
            walk = pool.submit(self._anneal, walkers, limit)
            while not (self._proof.done() or limit.passed):
                wait([self._proof], timeout=_SECONDS_PER_LOOK)
            wait([walk], timeout=min(self._for_other_orders(limit).remaining, TIMEOUT_MAX))
            limit.stop()
            walk.result()
        is_close = self._possible_gain <= (settings.small_proof_gap if self._is_small else settings.long_proof_gap)
        if is_close or self._proof.done() or not self.solves_neighborhoods:
            self.stop_proof()

    def _begin_proof(self, *first: Callable[[], None]) -> None:
        """Run `ilp`, and other searches before it, at the same time as what follows."""
        if self.solves_neighborhoods:
            self._proof_limit = self._share_of(self.deadline, self.settings.first_round_share)
        self._proof = self.pool.submit(_call, *first, partial(self._consult, self._prove, self._proof_limit))

    def _begin_beside(self, exceeding: Sequence[Schedule]) -> None:
        """Begin searches for a schedule that fits, and then `ilp`; but its first bound first if one nearly fits.

        Annealing then makes it fit sooner than the walks of a long network end.
        """
        graph, budget = self.problem.graph, self.problem.budget_bytes
        excess = min(simulate(graph, schedule).peak_bytes for schedule in exceeding) - budget
        is_near = excess <= self.settings.nearly_fits * (budget - graph.resident_bytes)
        self._begin_proof(*([self._bound_first] if is_near else []), self._search_beside)

    def _bound_first(self) -> None:
        """Take over the first bound of `ilp`, in a share of the time that it has."""
        self._consult(self._relax, self._proof_limit, self.settings.bound_first_share)

    def _relax(self, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        """Return the bound of the linear relaxations with which `ilp` begins in a large graph."""
        self._programs = ilp.ProgramSearch(problem)
        return self._programs.relax(deadline)

    def _prove(self, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        """Return what `ilp` finds; it goes on if it has begun."""
        if self._programs is None:
            return ilp.propose(problem, deadline=deadline, seed=seed)
        return self._programs.run(deadline, self.best.time)

    def stop_proof(self) -> None:
        """Stop `ilp` if it goes on."""
        self._proof_limit.stop()
        proof, self._proof = self._proof, None
        if proof is not None:
            proof.result()

    def search_from_the_best(self) -> None:
        """Run `anneal` once more from the best schedule, and integer programs at the same time."""
        self.seed += 1
        self.answers.clear()
        if self.best.schedule is None:
            self._search_in(self._share_of(self.deadline, self.settings.nothing_fits_share))
        if self.best.schedule is not None:
            self._search_in(self._for_other_orders(self.deadline))

    def _search_in(self, limit: Deadline) -> None:
        """Run `anneal`; and at the same time, if there is enough, `ilp` if it goes on, or else `neighborhoods`.

        In a small graph these follow `anneal` if `ilp` goes on.
        """
        if not self.solves_neighborhoods:
            self._anneal(anneal.WALKERS, limit)
        elif self._proof is not None:
            self._anneal(1, self._share_of(limit, self.settings.small_anneal_share) if self._is_small else limit)
            if self._is_small:
                self._consult(neighborhoods.propose, limit)
            self.stop_proof()
        else:
            programs = self.pool.submit(self._consult, neighborhoods.propose, limit)
            self._anneal(1, limit)
            limit.stop()  # when annealing gives up, programs find no more either
            programs.result()

    def squeeze_peak(self) -> None:
        """Look harder for the smallest peak if no schedule fits so far."""
        if self.best.schedule is None and not self.best.is_final:
            known, smallest = self._smallest, self.best.smallest
            if known is not None and smallest is not None:
                known = known._replace(peak_bytes=self.best.smallest_peak_bytes, schedule=smallest)
            self.best.offer(squeeze(self.problem, self.deadline, known=known).schedule)

    @property
    def _orders(self) -> tuple[Graph, ...]:
        """The graph in the late order and in the given one, if they differ.

        The late one keeps what cannot be recomputed for longer, which at small budgets can cost more than it gains.
        """
        late, given = self.late.graph, self.problem.graph
        return (late,) if late is given else (late, given)

    @property
    def _is_small(self) -> bool:
        return len(self.problem.graph.operations) < self.settings.small_operations

    @property
    def _is_deep(self) -> bool:
        """Whether `hierarchical` runs first."""
        operations = len(self.problem.graph.operations)
        return self.problem.chain is None and operations >= self.settings.hierarchical_first_operations

    @property
    def _possible_gain(self) -> float:
        """The share of the best schedule's time by which another one, in any order, may be faster."""
        return relative_gap(self.best.time, self.best.global_bound)

    def _for_other_orders(self, deadline: Deadline) -> Deadline:
        """Return the time for schedules outside the answer's search space: short once it is optimal there."""
        if not self.best.is_optimal:
            return deadline
        settings, now = self.settings, clock.now()
        gain = self._possible_gain
        if gain <= settings.other_orders_least_gain:
            return deadline.within(0.0)
        more = settings.other_orders_ratio * (now - self._started) * gain / settings.other_orders_gain
        self._other_orders_end = min(self._other_orders_end, now + settings.other_orders_least_seconds + more)
        return deadline.within(self._other_orders_end - now)

    def _walk_in_time(self, graph: Graph, deadline: Deadline) -> None:
        """Walk, unless nothing better can be found or time is up."""
        if not (self.best.is_final or deadline.passed):
            self._walk(graph, deadline)

    def _walk(self, graph: Graph, deadline: Deadline) -> None:
        """Offer the fastest schedule of walks through an order that evict when memory is short.

        In the late order, also of those that keep what is smaller: they at times fit where others do not, or are
        faster, and both kinds are starts for other searches. Beside other solvers the first one that fits is enough:
        then `ilp` begins sooner.
        """
        any_fits = deadline is self.until_fitting
        for keeps_smaller in [False] if graph is self.problem.graph else [False, True]:
            walks = EvictionWalks(graph, keeps_smaller=keeps_smaller)
            walk = walks.fitting(self.problem.budget_bytes, deadline, any_fits=any_fits)
            if walk is not None:
                self.answers.append(walk)
                self.best.offer(walk)
                if any_fits:
                    break

    def _anneal(self, walkers: int, deadline: Deadline) -> None:
        """Anneal from what is known; where that gives up far from the bound, do it again with other random numbers."""
        ends, goes_on = math.isfinite(deadline.remaining), True
        while goes_on:
            self._consult(partial(self._anneal_once, walkers=walkers), deadline)
            self.seed += 1
            is_far = self._possible_gain > self.settings.anneal_again_gap
            goes_on = ends and is_far and not (self.best.is_final or deadline.passed)

    def _anneal_once(self, problem: Problem, *, deadline: Deadline, seed: int, walkers: int) -> Proposal:
        """Anneal, and note until when if nothing fits so far."""
        self._annealing = deadline if self.best.schedule is None else None
        return anneal.search(problem, deadline=deadline, seed=seed, walkers=walkers, only_starts=True)

    def _ask(self, solver: str, deadline: Deadline, share: float = 1.0) -> None:
        """Take over the answer of a solver in a share of the time."""
        self._consult(load_solver(solver), deadline, share)

    def _consult(self, propose: Propose, deadline: Deadline, share: float = 1.0) -> None:
        """Take over the answer of a function and its intermediate results, unless the best is final or time is up."""
        best = self.best
        if best.is_final or deadline.passed:
            return
        known = tuple(schedule for schedule in (best.schedule or best.smallest,) if schedule is not None)
        exceeding = chain.from_iterable(self.exceeding.values())
        problem = self.late.changed(starts=(*known, *self.answers, *self.problem.starts, *exceeding))
        try:
            update = partial(self._update, propose=propose, deadline=deadline)
            limit = deadline.within(share * deadline.remaining, update)
            proposal = propose(problem, deadline=limit, seed=self.seed)
            best.annotate(proposal)
            if proposal.schedule is not None:
                self.answers.append(proposal.schedule)
            update(proposal)
        except UnsuitableProblemError:
            pass
        except BaseException:
            deadline.stop()  # Another search at the same time would go on.
            raise

    def _update(self, proposal: Proposal, propose: Propose, deadline: Deadline) -> None:
        """Take over a proposal; once the result is final, stop all searches with that deadline."""
        if proposal.search_space == "input order" and self.late is not self.problem:
            proposal = replace(proposal, search_space="late order")  # the input order of what solvers get
        self.best.update(proposal)
        if proposal.exceeding and (propose == self._prove or self._is_deep):
            self.exceeding[propose] = proposal.exceeding
            if self._proof is None and propose != self._prove:
                self._begin_beside(proposal.exceeding)
        if self.best.schedule is not None:
            self.until_fitting.stop()
        self.deadline.report(self.best.proposal())
        if self.best.is_final:
            deadline.stop()
            self._proof_limit.stop()

    @staticmethod
    def _share_of(deadline: Deadline, share: float) -> Deadline:
        return deadline.within(share * deadline.remaining)


def _call(*searches: Callable[[], None]) -> None:
    for search in searches:
        search()


def _bound_chain(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a bound over all schedules of a chain."""
    assert problem.chain is not None
    bound = one_cut_bound(chain_costs(problem.chain), problem.budget_bytes)
    return Proposal(None, "persistent", bound, bound, infeasible=math.isinf(bound))


def _solve_few_programs(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return what `ilp` finds with its first integer programs, without compiled kernels."""
    return ilp.ProgramSearch(problem, SETTINGS.few_programs, repair=False).run(deadline)


@dataclass(frozen=True)
class Stage:
    """A step of the policy.

    Attributes
    ----------
    solvers : tuple of str
        The solvers that it runs.
    condition : str
        When it runs them, in words.
    act : callable
        The method of the policy; it checks the condition itself.
    """

    solvers: tuple[str, ...]
    condition: str
    act: Callable[[_Policy], None] = field(repr=False)

    def __str__(self) -> str:
        return f"{', '.join(self.solvers)}: {self.condition}"


STAGES = (
    Stage((), "schedules of other budgets or shapes, if there are any", _Policy.try_known_schedules),
    Stage(("eviction walk",), "if these take much longer than the plain step", _Policy.walk_within_budget),
    Stage(
        tuple(dict.fromkeys((*SETTINGS.uncompiled_solvers, *SETTINGS.uncompiled_chain_solvers, "ilp"))),
        'if an answer within a gap is enough; `ilp` with few cuts, but "greedy-segments" in its place for chains',
        _Policy.answer_quickly,
    ),
    Stage(
        ("dp",),
        "chains of layers; the last stage if another schedule may save at most"
        f" {SETTINGS.other_orders_least_gain:.2%} of the time",
        _Policy.solve_chain,
    ),
    Stage(
        ("hierarchical",),
        f"graphs of {SETTINGS.hierarchical_first_operations} operations or more; the last stage if the answer is"
        f" optimal, or from {SETTINGS.hierarchical_only_operations} operations on; the next ones, and `ilp`, begin at"
        " the same time once it says that nothing fits so far",
        _Policy.solve_deep_network,
    ),
    Stage(
        (*SETTINGS.quick_solvers, "eviction walk"),
        f"always, unless `hierarchical` has run and left a gap of at most {SETTINGS.quick_gap:.0%}",
        _Policy.try_quick_solvers,
    ),
    Stage(
        ("smallest peak", "live sets"),
        f"if no schedule fits so far; up to {MOST_OPERATIONS} operations, the second may prove that none does",
        _Policy.find_smallest_peak,
    ),
    Stage(
        ("ilp", "hierarchical", "anneal"),
        f"always `ilp`; the others after {SETTINGS.ilp_alone_seconds:g} s or {SETTINGS.ilp_alone_share:.0%} of the time"
        f" (`hierarchical` from {SETTINGS.hierarchical_operations} operations on), or at once if it has run",
        _Policy.prove_and_search,
    ),
    Stage(
        ("anneal", "neighborhoods"),
        "from the best schedule, if another order may save time; far from the bound `ilp` goes on, instead of"
        f" `neighborhoods` from {SETTINGS.small_operations} operations on",
        _Policy.search_from_the_best,
    ),
    Stage(("squeeze",), "if no schedule fits so far", _Policy.squeeze_peak),
)
"""The stages of `auto`, in order. No stage runs a solver once nothing better can be found."""
