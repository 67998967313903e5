# shellcheck shell=bash
# launch PROGRAM FLAG...: run train.py or train_async.py with these flags.
#
#   SLIME_DRY_RUN=1           check the flags and print the plan (full: with the configuration); nothing is started
#   RAY_ADDRESS=HOST:6379     join this Ray cluster
#   RAY_ADDRESS=http://HOST:8265 (or RAY_API_SERVER_ADDRESS, Ray's own name for it)
#                             submit to this cluster as a Ray job
#   none of these             a run that fits on one node starts a Ray of its own and ends it;
#                             a larger one says how to start a cluster, and exits with status 2
#
# Paths are those of this machine: on a cluster, the repository is on a file system that its nodes share.

launch() {
    local repository python ray dashboard cluster nodes
    repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
    python=$(own_or_installed "$repository/.venv/bin/python" python3)
    ray=$(own_or_installed "$repository/.venv/bin/ray" ray)
    local command=("$python" "$repository/$1" "${@:2}")

    if [[ ${SLIME_DRY_RUN:-0} != 0 ]]; then
        [[ $SLIME_DRY_RUN == full ]] && exec "${command[@]}" --dry-run=full
        exec "${command[@]}" --dry-run
    fi

    cluster=${RAY_ADDRESS:-}
    dashboard=${RAY_API_SERVER_ADDRESS:-} # which wins in Ray too
    if [[ -z $dashboard && $cluster == http?(s)://* ]]; then
        dashboard=$cluster
    fi
    if [[ -n $dashboard ]]; then
        # A job begins in a directory of Ray's; env -C takes it back here, so that relative paths hold.
        exec "$ray" job submit --address "$dashboard" -- env -C "$PWD" "${command[@]}"
    fi

    nodes=$(nodes_of "${@:2}")
    if ((nodes > 1)) && [[ -z $cluster || $cluster == local ]] && ! names_cluster "${@:2}"; then
        how_to_start_a_cluster "$nodes" >&2
        exit 2
    fi
    exec "${command[@]}"
}

# Print the repository's own program where it exists, else the name to look up in PATH.
own_or_installed() {
    if [[ -x $1 ]]; then
        echo "$1"
    else
        echo "$2"
    fi
}

# Print how many nodes the flags ask for.
nodes_of() {
    local slots per_node
    per_node=$(value_of --num-gpus-per-node 8 "$@")
    slots=$(($(value_of --actor-num-nodes 1 "$@") * $(value_of --actor-num-gpus-per-node 8 "$@")))
    if [[ " $* " != *" --colocate "* && " $* " != *" --debug-train-only "* ]]; then
        slots=$((slots + $(value_of --rollout-num-gpus 0 "$@"))) # engines have GPUs of their own
    fi
    echo $(((slots + per_node - 1) / per_node))
}

# value_of FLAG DEFAULT WORD...: print the number after the flag; the last one counts, as it does for the program.
value_of() {
    if [[ " ${*:3} " =~ .*" $1"[\ =]([0-9]+)" " ]]; then
        echo "${BASH_REMATCH[1]}"
    else
        echo "$2"
    fi
}

names_cluster() {
    [[ " $* " == *" --ray-address"[\ =]* ]]
}

how_to_start_a_cluster() {
    cat <<END
$(basename -- "$0"): this run needs $1 nodes, and RAY_ADDRESS names no Ray cluster. Start one:
    ray start --head                            on the first node
    ray start --address FIRST_NODE:6379         on each of the other $(($1 - 1))
and run the script again, on any of them, with one of these in its environment:
    RAY_ADDRESS=FIRST_NODE:6379                 runs here
    RAY_ADDRESS=http://FIRST_NODE:8265          submits a Ray job
    SLIME_DRY_RUN=1                             checks the flags and needs no cluster
END
}
