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
{{- $own := not .Values.storage.models.existingClaim }}
{{- if and $own (not (has "ReadWriteMany" .Values.storage.models.accessModes)) }}
{{- fail "storage.models.accessModes: the pods of a group run on several nodes; set [ReadWriteMany]" }}
{{- end }}
{{- end }}
{{- if and .Values.storage.models.readOnly (not .Values.storage.models.existingClaim) }}
{{- fail "storage.models.readOnly: a new claim is empty; set storage.models.existingClaim too" }}
{{- end }}
{{- end }}
