//! Chromium without a window, driven through WebDriver. It ends with this process.

use std::{env, fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Duration};

use fantoccini::{Client, ClientBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use lock_tests::Supervised;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(30);

/// The widths of a desk and of a telephone.
pub(crate) const WIDTHS: [u32; 2] = [1280, 400];

/// The name of another site, which resolves to the address of the tests.
pub(crate) const REBOUND: &str = "evil.example";

/// A browser with one page.
pub(crate) struct Browser {
    page: Client,
    _driver: Supervised,
}

impl Browser {
    /// Runs a test with a page of a new browser.
    pub(crate) async fn run(test: impl AsyncFnOnce(&Client)) {
        Self::start(true).await.drive(test).await;
    }

    pub(crate) async fn without_javascript(test: impl AsyncFnOnce(&Client)) {
        Self::start(false).await.drive(test).await;
    }

    async fn drive(self, test: impl AsyncFnOnce(&Client)) {
        // The browser ends when its driver is killed, also if the test panics.
        test(&self.page).await;
        let _ = self.page.close().await;
    }

    async fn start(has_javascript: bool) -> Self {
        let directory = TempDir::new().unwrap().keep();
        // Killing the driver kills the browser.
        let binary = directory.join("chromium");
        fs::write(
            &binary,
            "#!/bin/sh\nexec setpriv --pdeathsig KILL chromium \"$@\"\n",
        )
        .unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        let command = ["chromedriver", "--port=0"];
        let spawn = || Supervised::spawn(&directory, command).expect("a shell");
        let mut driver = spawn();
        let until = Instant::now() + PATIENCE;
        let port = loop {
            let log = driver.output();
            let port = log
                .split_once("successfully on port ")
                .and_then(|(_, rest)| {
                    let (port, _) = rest.split_once('.')?;
                    port.parse::<u16>().ok().filter(|port| *port > 0)
                });
            if let Some(port) = port {
                break port;
            }
            // The driver takes a port that is free over IPv6, which may be in use over IPv4.
            if log.contains("port not available") {
                driver = spawn();
            }
            assert!(Instant::now() < until, "chromedriver does not start: {log}");
            sleep(Duration::from_millis(20)).await;
        };
        let profile = directory.join("profile");
        let mut options = json!({
            "binary": binary,
            // Those of a desk take room, and appear when a page grows.
            "excludeSwitches": ["hide-scrollbars"],
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-dev-shm-usage", "--force-device-scale-factor=1",
                format!("--host-resolver-rules=MAP {REBOUND} 127.0.0.1"),
                format!("--user-data-dir={}", profile.display()),
            ],
        });
        if !has_javascript {
            options["prefs"] = json!({ "profile.managed_default_content_settings.javascript": 2 });
        }
        let capabilities = json!({ "goog:chromeOptions": options });
        let page = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .unwrap_or_else(|error| panic!("{error}: {}", driver.output()));
        Self {
            page,
            _driver: driver,
        }
    }
}

/// Changes the width of the page itself, which can be smaller than a window.
pub(crate) async fn resize(page: &Client, width: u32) {
    page.set_window_size(width, 900).await.unwrap();
}

/// Writes a picture of the page, if a directory for them is given.
pub(crate) async fn keep_picture(page: &Client, name: &str) {
    let Some(directory) = env::var_os("LOCK_TESTS_SCREENSHOTS").map(PathBuf::from) else {
        return;
    };
    let picture = page.screenshot().await.unwrap();
    fs::write(directory.join(format!("{name}.png")), picture).unwrap();
}
