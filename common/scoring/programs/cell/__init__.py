"""The cell of a scored program: what runs in the fresh interpreter that `common.scoring.programs.run` starts.

Three processes. The keeper reads the job, waits until the program has ended, its time is up or the run is gone, then
ends everything and clears up. The guard is the keeper's child and, under `namespaces`, the first process of a pid
namespace: with it everything in there dies. The program is the guard's child and the only one that runs generated code.

The modules import each other relatively and nothing else of this project, since here the package is not `common`: an
interpreter that need not load it starts in half the time.
"""
