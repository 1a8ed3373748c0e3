"""Programs that a model has written: from an answer to a program, and from a program to what it yields or whether it
passes its tests. Each runs in a cell.
"""

from common.scoring.programs.isolation import isolation, program_scorer
from common.scoring.programs.run import run_program
from common.scoring.programs.suites import passes
from common.scoring.programs.text import program_of

__all__ = ["isolation", "passes", "program_of", "program_scorer", "run_program"]
