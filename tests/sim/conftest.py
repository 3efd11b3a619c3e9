"""How many seeds of random faults to run, for each mode."""


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
    metafunc.parametrize(("fault_mode", "fault_seed"), [(mode, seed) for mode in modes for seed in seeds])
