"""Many runs: batches and sweeps on this machine or on a cluster. Nothing here parses a command line or prints.

    checked_yaml   files whose mistakes are named by their line
    identity       what a run is: experiment, code, parameters and data
    plan           a batch file becomes planned runs
    engine         what executes runs: the protocol
    recovery       what is finished, what is at work, what a crash left behind
    worker         one run, in a process that an engine started
    local, cluster the engines: processes of this machine, and Ray
    driver         takes a plan to its end with an engine
    sweep, study   a search over parameters with Optuna
    trackers       finished runs for Weights & Biases or trackio
    watch          what is running
    cleaning       runs that nobody needs
"""
