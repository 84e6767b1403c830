"""What measures the core: tasks, training, studies, reports, benchmarks."""
