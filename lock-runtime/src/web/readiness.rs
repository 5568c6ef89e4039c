//! The handler for readiness probes.

use std::{sync::Arc, time::Duration};

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};
use serde_json::json;
use tokio::sync::Mutex;

use crate::{
    client::LockClient,
    observe::health::{Health, Verdict},
    shell::time::Instant,
};

/// The time for which an answer is given to further probes.
const FRESH: Duration = Duration::from_secs(1);

/// Creates a handler of `GET` and `HEAD` for readiness probes.
///
/// It responds with 200 if the store grants locks ([`Healthy`](Verdict::Healthy) or
/// [`Degraded`](Verdict::Degraded)), and with 503 otherwise, also after
/// [`shutdown`](LockClient::shutdown). The body is JSON, such as
/// `{"verdict":"degraded","findings":[{"severity":"critical","code":"unavailable"}]}`. It contains
/// no address and no name; a change of the verdict is logged with them.
///
/// The answer is used for a second, and probes at the same time share one
/// [`health`](LockClient::health) call, so that many probes cost the store no more than one. It
/// takes up to a second while a server does not answer: give probes a time-out of two.
///
/// Do not use it for liveness probes: a restart does not bring the store back, and it loses the
/// locks that the process holds.
///
/// ```
/// use axum::{Router, routing::get};
/// use lock_runtime::{LockClient, web::readiness};
///
/// let locks = LockClient::in_memory();
/// let app: Router = Router::new()
///     .route("/ready", readiness(&locks))
///     .route("/alive", get(|| async { "" }));
/// # drop(app);
/// ```
pub fn readiness<S: Clone + Send + Sync + 'static>(locks: &LockClient) -> MethodRouter<S> {
    let probe = Arc::new(Probe {
        locks: locks.clone(),
        latest: Arc::default(),
    });
    get(move || {
        let probe = probe.clone();
        async move { probe.answer().await }
    })
}

struct Probe {
    locks: LockClient,
    // A tokio mutex: it is held during a call, so that there is only one at a time.
    latest: Arc<Mutex<Option<(Instant, Readiness)>>>,
}

#[derive(Clone)]
struct Readiness {
    verdict: Verdict,
    body: Arc<str>,
}

impl Probe {
    async fn answer(&self) -> Readiness {
        let mut latest = self.latest.clone().lock_owned().await;
        if let Some((at, answer)) = &*latest
            && at.elapsed() < FRESH
        {
            return answer.clone();
        }
        let locks = self.locks.clone();
        // A task of its own: a probe that gives up sooner leaves the answer to the next one.
        let asked = tokio::spawn(async move {
            let health = locks.health().await;
            let before = latest.as_ref().map(|(_, answer)| answer.verdict);
            log_change(before, &health);
            let answer = Readiness::from(&health);
            *latest = Some((Instant::now(), answer.clone()));
            answer
        });
        // The runtime is ending, or the subscriber of the log has panicked.
        asked.await.unwrap_or_else(|_| Readiness {
            verdict: Verdict::Unavailable,
            body: "{}".into(),
        })
    }
}

fn log_change(before: Option<Verdict>, health: &Health) {
    let verdict = health.verdict();
    if verdict == before.unwrap_or(Verdict::Healthy) {
        return;
    }
    let findings: Vec<_> = health.findings().iter().map(ToString::to_string).collect();
    let findings = findings.join(" | ");
    match verdict {
        Verdict::Healthy => tracing::info!(%verdict, "the state of the lock store has changed"),
        _ => tracing::warn!(%verdict, findings, "the state of the lock store has changed"),
    }
}

impl From<&Health> for Readiness {
    fn from(health: &Health) -> Self {
        let verdict = health.verdict();
        let mut codes: Vec<_> = health
            .findings()
            .iter()
            .map(|finding| (finding.severity, finding.code))
            .collect();
        // Those of several servers are one here.
        codes.dedup();
        let findings: Vec<_> = codes
            .iter()
            .map(|(severity, code)| json!({"severity": severity.as_str(), "code": code}))
            .collect();
        let body = json!({"verdict": verdict.as_str(), "findings": findings});
        Self {
            verdict,
            body: body.to_string().into(),
        }
    }
}

impl IntoResponse for Readiness {
    fn into_response(self) -> Response {
        let status = match self.verdict {
            Verdict::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::OK,
        };
        let headers = [
            (header::CONTENT_TYPE, "application/json"),
            (header::CACHE_CONTROL, "no-store"),
        ];
        (status, headers, self.body.to_string()).into_response()
    }
}
