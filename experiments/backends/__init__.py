"""Where the processes of an experiment run: on this host, in network namespaces, over ssh or under Slurm."""
