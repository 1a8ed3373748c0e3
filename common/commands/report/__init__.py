"""`lopa report`: what sweeps, runs and benches have left in a folder, as one page of pictures and tables."""
