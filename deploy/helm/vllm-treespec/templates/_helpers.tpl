{{- define "treespec.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "treespec.selector" -}}
app.kubernetes.io/name: vllm-treespec
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "treespec.labels" -}}
{{ include "treespec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "treespec.servedModelName" -}}
{{- .Values.servedModelName | default .Values.model -}}
{{- end }}

{{- define "treespec.modelsClaim" -}}
{{- .Values.storage.models.existingClaim | default (printf "%s-models" (include "treespec.name" .)) -}}
{{- end }}

{{- define "treespec.image" -}}
{{- $version := printf ":%s" (.Values.image.tag | default .Chart.AppVersion) -}}
{{- if .Values.image.digest }}{{ $version = printf "@%s" .Values.image.digest }}{{ end -}}
{{- printf "%s%s" .Values.image.repository $version -}}
{{- end }}

{{/* The value that names a claim which pods on one node only can use, or nothing. */}}
{{- define "treespec.oneNode" -}}
{{- range $name, $claim := pick .Values.storage "models" "drafter" }}
{{- $shared := or (has "ReadWriteMany" $claim.accessModes) (has "ReadOnlyMany" $claim.accessModes) }}
{{- $used := or (eq $name "models") $claim.existingClaim }}
{{- if and $used (not $shared) }}storage.{{ $name }}.accessModes {{ end }}
{{- end }}
{{- end }}

{{/* How many pods may run at the same time. */}}
{{- define "treespec.mostPods" -}}
{{- with .Values -}}
{{- $replicas := ternary .replicas .autoscaling.maxReplicas (eq .autoscaling.kind "none") -}}
{{- ternary (mul $replicas .groupSize) $replicas (eq .kind "LeaderWorkerSet") -}}
{{- end }}
{{- end }}

{{- define "treespec.isGroup" -}}
{{- if eq .Values.kind "LeaderWorkerSet" }}true{{ end -}}
{{- end }}

{{/* What Deployment and autoscaler share. */}}
{{- define "treespec.scaleTarget" -}}
{{- if include "treespec.isGroup" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "treespec.name" . }}
{{- end }}

{{/* Values that fit one by one and not together. */}}
{{- define "treespec.check" -}}
{{- if not .Values.image.repository }}
{{- fail "image.repository is empty: build the image (deploy/docker) and name it" }}
{{- end }}
{{- if not .Values.model }}
{{- fail "model is empty: name the target's folder or hub id" }}
{{- end }}
{{- if include "treespec.isGroup" . }}
{{- if ne .Values.device "cuda" }}
{{- fail "kind LeaderWorkerSet divides the target over GPUs: set device: cuda, or kind: Deployment" }}
{{- end }}
{{- end }}
{{- with include "treespec.oneNode" . }}
{{- $pods := int (include "treespec.mostPods" $) }}
{{- if gt $pods 1 }}
{{- fail (printf "%s: %d pods may run on several nodes, and wait there for the volume for ever; use a claim that is ReadWriteMany or ReadOnlyMany and set it there, or run one pod" (trim . | replace " " " and ") $pods) }}
{{- end }}
{{- if eq (dig "type" "" $.Values.strategy) "RollingUpdate" }}
{{- fail (printf "strategy.type RollingUpdate: with %s a new pod on another node waits for ever for the old one's volume; leave strategy empty, or use a claim that is ReadWriteMany or ReadOnlyMany and set it there" (trim . | replace " " " and ")) }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.host is empty: name the host that clients call" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (ne .Values.service.type "ClusterIP") }}
{{- if not (contains "ipBlock" (toJson .Values.networkPolicy.from)) }}
{{- fail (printf "service.type %s: the network policy lets in no address outside the cluster; add an ipBlock to networkPolicy.from" .Values.service.type) }}
{{- end }}
{{- end }}
{{- if and .Values.storage.models.readOnly (not .Values.storage.models.existingClaim) }}
{{- fail "storage.models.readOnly: a new claim is empty; set storage.models.existingClaim too" }}
{{- end }}
{{- end }}
