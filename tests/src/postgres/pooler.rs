//! A real PgBouncer in front of a server.

use std::{env, fs, io, path::PathBuf};

use tokio::time::timeout;

use super::{PATIENCE, PostgresServer, installation::Installation, url};
use crate::{
    ports::free_port,
    supervised::{Log, Supervised},
};

/// A PgBouncer, killed when it is dropped or when this process ends in any way.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    process: Supervised,
    _directory: Supervised,
}

impl PgBouncer {
    /// Starts it in transaction mode, with at most five connections to each database.
    ///
    /// # Panics
    /// When it is not installed, or not ready within 30 s, with its log.
    pub async fn to(server: &PostgresServer) -> Self {
        let mut attempts = 20;
        loop {
            let port = free_port();
            attempts -= 1;
            let launched = Self::launch(server, port);
            let launched = launched.unwrap_or_else(|error| panic!("PgBouncer: {error}"));
            let mut log = launched.process.log();
            let ready = |log: &Log| log.ended || log.text.contains("process up");
            let ready = timeout(PATIENCE, log.wait_for(ready)).await;
            if ready.is_ok_and(|log| log.is_ok_and(|log| !log.ended)) {
                return launched;
            }
            let log = launched.process.output();
            // Another process bound the port between our check and its own.
            let is_taken = log.contains("Address already in use");
            assert!(is_taken && attempts > 0, "PgBouncer did not start:\n{log}");
        }
    }

    /// The URL of a database, as the superuser.
    pub fn url_of(&self, database: &str) -> String {
        url("postgres", None, self.port, database)
    }

    fn launch(server: &PostgresServer, port: u16) -> io::Result<Self> {
        let installation = Installation::find()?;
        let directory = installation.new_directory()?;
        let home = directory.directory();
        let (config, users) = (home.join("pgbouncer.ini"), home.join("users.txt"));
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             default_pool_size = 5\nmax_client_conn = 500\n",
            server.port(),
            users.display(),
        );
        installation.write(&config, &text)?;
        installation.write(&users, "\"postgres\" \"\"\n")?;
        let mut words = installation.as_owner(home);
        words.push(program()?.display().to_string());
        words.push(config.display().to_string());
        let process = Supervised::spawn(home, words.iter().map(String::as_str))?;
        Ok(Self {
            port,
            process,
            _directory: directory,
        })
    }
}

fn program() -> io::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places = env::split_paths(&path).chain(["/usr/sbin".into()]);
    let mut programs = places.map(|place| place.join("pgbouncer"));
    let missing = "PgBouncer is missing; `tests/run.sh --stores` installs it";
    programs
        .find(|program| fs::metadata(program).is_ok())
        .ok_or_else(|| io::Error::other(missing))
}
