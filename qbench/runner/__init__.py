"""Running cells: cell.py is the worker, local.py runs it in processes here, ray.py on a cluster."""
