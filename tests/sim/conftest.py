"""How many seeds of random faults to run, for each mode, and for some with streaming."""


def pytest_addoption(parser):
    parser.addoption("--fault-seeds", type=int, default=8, help="seeds of random faults for each mode")


def pytest_generate_tests(metafunc):
    if "fault_seed" not in metafunc.fixturenames:
        return
    seeds = range(metafunc.config.getoption("--fault-seeds"))
    modes = (
        "pivot",
        "pivot_best",
        "disaggregated",
        "colocated",
        "rollout_reward_colocated",
        "static",
        "rule_based",
    )
    cases = [(mode, "off", seed) for mode in modes for seed in seeds]
    streaming = [("pivot_best", way) for way in ("eager", "bursts", "late")]
    streaming.append(("rollout_reward_colocated", "eager"))
    cases += [(mode, way, seed) for mode, way in streaming for seed in seeds[: len(seeds) // 2]]
    metafunc.parametrize(("fault_mode", "fault_streaming", "fault_seed"), cases)
