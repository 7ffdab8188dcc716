"""What bench_faults.py is made of: a system to hurt, what hurts it, the load meanwhile, the cases."""
