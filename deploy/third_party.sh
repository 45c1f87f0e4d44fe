#!/usr/bin/env bash
# usage: deploy/third_party.sh
# Where GitHub cannot be reached it names what is missing; tests of that are skipped.
# Gets the two charts that deploy/ has values for, and the definitions of custom resources, into
# deploy/third_party/. `make deploy-check` checks our values against the charts; tests/crds holds
# the schemas of the definitions. They belong to other projects (each under Apache-2.0) and are
# not part of this repository.
set -euo pipefail
cd "$(dirname "$0")"

get() { # folder repository reference path...
    local folder=third_party/$1 url=https://github.com/$2 reference=$3
    shift 3
    [ ! -e "$folder" ] || return 0
    echo "$url $reference"
    git init --quiet "$folder.part"
    git -C "$folder.part" remote add origin "$url"
    git -C "$folder.part" sparse-checkout set --no-cone /LICENSE "${@/#//}"
    if git -C "$folder.part" fetch --quiet --depth 1 --filter blob:none origin "$reference" &&
        git -C "$folder.part" -c advice.detachedHead=false checkout --quiet FETCH_HEAD; then
        mv "$folder.part" "$folder"
    else
        echo "not reached, left out: $folder"
    fi
}

mkdir -p third_party
rm -rf third_party/*.part

# KubeRay 1.7.0
get kuberay ray-project/kuberay 59d663aeec13760646da3db9c1cf8cfe883e30b7 \
    ray-operator/config/crd/bases/ray.io_rayservices.yaml
# LeaderWorkerSet 0.9.0
get lws kubernetes-sigs/lws f056f611ae7721f9983ac35f26bfbae8547fd9f3 \
    config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml
# KEDA 2.20.2
get keda kedacore/keda 68a5b5028f35b22d50597c69819ab32c4e92f21a \
    config/crd/bases/keda.sh_scaledobjects.yaml
# Prometheus operator 0.93.0
get prometheus-operator prometheus-operator/prometheus-operator \
    f8fafd475f3d132e239432ae6172de60a6cb6516 \
    example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml \
    example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml
# production-stack's chart 0.1.12
get production-stack vllm-project/production-stack \
    66b60661aa3052810859a417559e9e830772a091 helm/
# vLLM's chart
get vllm vllm-project/vllm refs/tags/v0.32.0 examples/deployment/chart-helm/
