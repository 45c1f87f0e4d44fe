{{/* The pod. Called with (dict "root" . "role" "leader" or "worker"). */}}
{{- define "treespec.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- with .root.Values -}}
serviceAccountName: {{ .serviceAccountName }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .shutdownSeconds 30 }}
securityContext:
  {{- toYaml .podSecurityContext | nindent 2 }}
{{- with .image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (eq .device "cuda") .gpu.runtimeClassName }}
runtimeClassName: {{ .gpu.runtimeClassName }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: vllm
    image: {{ include "treespec.image" $root | quote }}
    imagePullPolicy: {{ .image.pullPolicy }}
    command: [vllm, serve]
    args:
      {{- include "treespec.args" (dict "root" $root "role" $role) | nindent 6 }}
    env:
      {{- include "treespec.env" $root | nindent 6 }}
    securityContext:
      {{- toYaml .securityContext | nindent 6 }}
    resources:
      {{- include "treespec.resources" $root | nindent 6 }}
    {{- if eq $role "leader" }}
    ports:
      - name: http
        containerPort: {{ .containerPort }}
    startupProbe:
      {{- include "treespec.probe" .startupProbe | nindent 6 }}
    readinessProbe:
      {{- include "treespec.probe" .readinessProbe | nindent 6 }}
    livenessProbe:
      {{- include "treespec.probe" .livenessProbe | nindent 6 }}
    lifecycle:
      preStop:
        exec:
          # The Service learns that the pod goes; until then it still sends requests.
          command: [sleep, "5"]
    {{- end }}
    volumeMounts:
      - name: models
        mountPath: {{ .storage.models.mountPath }}
        readOnly: {{ .storage.models.readOnly }}
      {{- if .storage.drafter.existingClaim }}
      - name: drafter
        mountPath: {{ .storage.drafter.mountPath }}
        readOnly: true
      {{- end }}
      - name: cache
        mountPath: /cache
      - name: tmp
        mountPath: /tmp
      - name: shm
        mountPath: /dev/shm
      {{- with .extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: models
    persistentVolumeClaim:
      claimName: {{ include "treespec.modelsClaim" $root }}
      readOnly: {{ .storage.models.readOnly }}
  {{- with .storage.drafter.existingClaim }}
  - name: drafter
    persistentVolumeClaim:
      claimName: {{ . }}
      readOnly: true
  {{- end }}
  - name: cache
    emptyDir:
      sizeLimit: {{ .storage.cache.sizeLimit }}
  - name: tmp
    emptyDir:
      sizeLimit: {{ .storage.tmp.sizeLimit }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .storage.shm.sizeLimit }}
  {{- with .extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "treespec.probe" -}}
httpGet:
  path: /health
  port: http
{{ toYaml . }}
{{- end }}

{{- define "treespec.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if eq .Values.device "cuda" }}
{{- $gpus := dict .Values.gpu.resource .Values.gpu.count -}}
{{- $resources = mustMergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) -}}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "treespec.args" -}}
{{- $role := .role -}}
{{- $isGroup := include "treespec.isGroup" .root -}}
{{- $served := include "treespec.servedModelName" .root -}}
{{- with .root.Values -}}
- {{ .model | quote }}
- --served-model-name
- {{ $served | quote }}
- --host
- 0.0.0.0
- --port
- {{ .containerPort | quote }}
- --shutdown-timeout
- {{ .shutdownSeconds | quote }}
{{- if .specConfig }}
- --speculative-config
- {{ .specConfig | toJson | quote }}
{{- end }}
{{- $gpus := ternary (mul .gpu.count .groupSize) .gpu.count (eq $isGroup "true") }}
{{- if and (eq .device "cuda") (gt (int $gpus) 1) }}
- --tensor-parallel-size
- {{ $gpus | quote }}
{{- end }}
{{- if $isGroup }}
- --nnodes
- $(LWS_GROUP_SIZE)
- --node-rank
- $(LWS_WORKER_INDEX)
- --master-addr
- $(LWS_LEADER_ADDRESS)
{{- if eq $role "worker" }}
- --headless
{{- end }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Every folder that something writes to lies on a volume: the root is read only. */}}
{{- define "treespec.env" -}}
- name: HOME
  value: /cache
# A user id without a line in /etc/passwd has no name, and torch asks for one.
- name: USER
  value: treespec
- name: XDG_CACHE_HOME
  value: /cache
- name: VLLM_CACHE_ROOT
  value: /cache/vllm
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /cache/inductor
- name: TMPDIR
  value: /tmp
- name: HF_HOME
  value: {{ ternary "/cache" .Values.storage.models.mountPath .Values.storage.models.readOnly }}/hub
{{- if eq .Values.device "cpu" }}
- name: VLLM_CPU_KVCACHE_SPACE
  value: {{ .Values.cpu.kvCacheGiB | quote }}
- name: VLLM_CPU_OMP_THREADS_BIND
  value: {{ .Values.cpu.threadsBind | quote }}
{{- if eq .Values.cpu.threadsBind "nobind" }}
- name: OMP_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: vllm
      resource: limits.cpu
{{- end }}
{{- end }}
{{- if include "treespec.isGroup" . }}
- name: VLLM_HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- with .Values.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: HF_TOKEN
{{- end }}
{{- with .Values.apiKeySecret }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: VLLM_API_KEY
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
