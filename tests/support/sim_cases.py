"""A small cluster that runs in a fraction of a second."""

from dataclasses import replace

from shared.sim.driver import Simulation
from shared.sim.modes import MODES, paper_shares
from shared.sim.run import Options
from shared.sim.scenarios import GROUP2, Shares
from shared.sim.workload import Lengths

SMALL = replace(
    GROUP2,
    name="small",
    num_devices=8,
    workload=replace(
        GROUP2.workload,
        prompts_per_step=4,
        samples_per_prompt=4,
        response=Lengths(200, 0.7, 1500),
        verdict=Lengths(400, 0.7, 2000),
    ),
    genrm_tp=2,
    paper_split=Shares(4, 2, 2),
    paper_shared_training=2,
    pivot_training=2,
    training_fixed_s=2.0,
    decide_period_s=1.0,
)


def simulate(mode, seed=0, scenario=SMALL, shares=None, **options):
    chosen = MODES[mode]
    settings = Options(**{"num_steps": 5, "warmup_steps": 2, **options})
    return Simulation(scenario, chosen, shares or paper_shares(scenario, chosen), seed, settings).run()
