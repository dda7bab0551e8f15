"""Running cells: cell.py is the worker; local.py runs it in local processes, ray.py on a cluster."""
