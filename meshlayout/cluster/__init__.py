"""Communication between the processes of a run, apart from devices."""
