//! A Prometheus server that scrapes the processes of a test, and evaluates alerting rules.
//! `tests/run.sh` installs it.

use std::{collections::BTreeMap, fs, net::SocketAddr, path::Path, time::Duration};

use serde::Deserialize;
use tempfile::TempDir;
use tokio::{
    process::Command,
    time::{Instant, sleep},
};

use crate::{ports::free_port, supervised::Supervised};

const PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(100);

/// A value with its labels.
#[derive(Debug, Deserialize)]
pub struct Sample {
    /// The labels, and the name of the metric as `__name__`.
    #[serde(rename = "metric")]
    pub labels: BTreeMap<String, String>,
    /// The time and the value.
    value: (f64, String),
}

impl Sample {
    /// Returns the value.
    ///
    /// # Panics
    /// When the server has sent no number.
    pub fn value(&self) -> f64 {
        self.value.1.parse().expect("a number")
    }
}

/// A Prometheus server, which ends with this process.
#[derive(Debug)]
pub struct Prometheus {
    url: String,
    process: Supervised,
}

impl Prometheus {
    /// A server that scrapes `/metrics` of the targets, and itself, four times a second, and
    /// evaluates the file of rules as often.
    ///
    /// # Panics
    /// When it does not answer within 30 s, with its log.
    pub async fn start(targets: &[SocketAddr], rules: &Path) -> Self {
        let directory = TempDir::new().expect("a temporary directory").keep();
        let address = format!("127.0.0.1:{}", free_port());
        let targets: Vec<_> = targets.iter().map(|it| format!("\"{it}\"")).collect();
        let config = format!(
            "global: {{ scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms }}\n\
             rule_files: [ \"{}\" ]\n\
             scrape_configs:\n\
             - {{ job_name: locks, static_configs: [ {{ targets: [ {} ] }} ] }}\n\
             - {{ job_name: prometheus, static_configs: [ {{ targets: [ \"{address}\" ] }} ] }}\n",
            rules.display(),
            targets.join(", "),
        );
        let file = directory.join("prometheus.yml");
        fs::write(&file, config).expect("the configuration is written");
        let command = [
            "prometheus",
            &format!("--config.file={}", file.display()),
            &format!("--storage.tsdb.path={}", directory.join("data").display()),
            &format!("--web.listen-address={address}"),
        ];
        let process = Supervised::spawn(&directory, command).expect("a shell");
        let started = Self {
            url: format!("http://{address}"),
            process,
        };
        let until = Instant::now() + PATIENCE;
        while started.ask("vector(1)").await.is_err() {
            let log = started.process.output();
            assert!(Instant::now() < until, "Prometheus does not start: {log}");
            sleep(POLL).await;
        }
        started
    }

    /// Evaluates an expression now.
    ///
    /// # Panics
    /// When the expression is invalid.
    pub async fn query(&self, expression: &str) -> Vec<Sample> {
        match self.ask(expression).await {
            Ok(samples) => samples,
            Err(error) => panic!("{expression}: {error}"),
        }
    }

    /// Waits until the value of an expression is true. An expression without a value is not.
    ///
    /// # Panics
    /// When it is not within 30 s.
    pub async fn becomes(&self, expression: &str) {
        let until = Instant::now() + PATIENCE;
        while self.query(expression).await.is_empty() {
            assert!(
                Instant::now() < until,
                "not within {PATIENCE:?}: {expression}"
            );
            sleep(POLL).await;
        }
    }

    async fn ask(&self, expression: &str) -> Result<Vec<Sample>, String> {
        let asked = Command::new("promtool")
            .args(["query", "--format=json", "instant", &self.url, expression])
            .output();
        let output = asked.await.map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
    }
}
