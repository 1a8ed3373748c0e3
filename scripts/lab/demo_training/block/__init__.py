"""The block-diffusion demo models, one module for each stage, strung together by scripts/lab/train_demo_block.py.

    data (clean rows of one length) -> noise (two complementary copies) -> loss -> checkpoint -> check
    teacher -> decode -> trajectories -> the same stages with the certainty loss

`recipe` holds the sizes of both runs.
"""
