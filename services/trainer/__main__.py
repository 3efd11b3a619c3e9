from services.trainer.app import main
from shared.bus.process import run_process

if __name__ == "__main__":
    run_process("trainer", main)
