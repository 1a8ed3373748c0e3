"""Parts of the study that are no comparison of settings, and what makes its page (`scripts/lab/study.sh`)."""
