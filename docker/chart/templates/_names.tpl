{{- define "workbench.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "workbench.account" -}}
{{ .Values.serviceAccount.name | default (include "workbench.name" .) }}
{{- end }}

{{- define "workbench.claim" -}}
{{ .Values.claim.name | default (printf "%s-notebooks" (include "workbench.name" .)) }}
{{- end }}

{{- define "workbench.hubSecret" -}}
{{ .Values.hubToken.secret | default (and .Values.hubToken.value (printf "%s-hub" (include "workbench.name" .))) | default "" }}
{{- end }}

{{- define "workbench.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "workbench.selector" -}}
app.kubernetes.io/name: jupyterlab
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "workbench.workers" -}}
{{ .Values.workers.namespace | default .Release.Namespace }}
{{- end }}

{{- define "workbench.metadata" -}}
{{ include "workbench.metadataIn" (dict "root" . "namespace" .Release.Namespace) }}
{{- end }}

{{- define "workbench.metadataIn" -}}
namespace: {{ .namespace }}
labels:
  {{- include "workbench.selector" .root | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "workbench.checkLabels" -}}
{{- if not (has (get .labels "pod-security.kubernetes.io/enforce") (list "restricted" "baseline")) -}}
{{- fail (printf "namespace %s enforces no pod security standard, so who may create pods there can mount a node's files; run: kubectl label namespace %s pod-security.kubernetes.io/enforce=restricted (or set checkNamespace=false)" .name .name) -}}
{{- end -}}
{{- end }}
