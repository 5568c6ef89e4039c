//! Settings and start of a server.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::Mutex,
};

use tokio::{task::spawn_blocking, time::timeout};

use super::{PATIENCE, PostgresServer, State, installation::Installation};
use crate::{
    ServerClock,
    certificates::Certificates,
    ports::free_port,
    supervised::{Log, Supervised},
};

/// Settings of a [`PostgresServer`] to be started.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    lines: Vec<String>,
    pub(super) password: Option<String>,
    pub(super) certificates: Option<Certificates>,
    clock: Option<ServerClock>,
    /// The port of the primary, if it is a standby.
    primary: Option<u16>,
}

impl Builder {
    /// A line of `postgresql.conf`: `.setting("max_connections", "20")`.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.lines
            .push(format!("{name} = '{}'", value.replace('\'', "''")));
        self
    }

    /// Does not wait for the disk. The data survive [`kill`](PostgresServer::kill), as the system
    /// still writes them.
    #[must_use]
    pub fn in_memory(self) -> Self {
        self.setting("fsync", "off")
            .setting("full_page_writes", "off")
    }

    /// Requires passwords of all users; this one is that of the superuser, and the URLs include it.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Accepts TLS, with a certificate for `127.0.0.1` and `localhost`.
    #[must_use]
    pub fn tls(self) -> Self {
        self.tls_for(&["127.0.0.1", "localhost"])
    }

    /// The same with a certificate for other names or addresses.
    #[must_use]
    pub fn tls_for(mut self, names: &[&str]) -> Self {
        self.certificates = Some(Certificates::new(names));
        self
    }

    /// The same with an expired certificate for another name that is its own authority.
    #[must_use]
    pub fn tls_self_signed(mut self) -> Self {
        self.certificates = Some(Certificates::self_signed());
        self
    }

    /// Makes it use a clock that the test sets.
    #[must_use]
    pub fn clock(mut self, clock: &ServerClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Makes it a standby of a server that requires no password. It replicates under the name
    /// `standby`, for `synchronous_standby_names`, until [`promote`](PostgresServer::promote).
    #[must_use]
    pub fn standby_of(mut self, primary: &PostgresServer) -> Self {
        self.primary = Some(primary.port());
        self
    }

    /// Starts the server and waits until it is ready.
    ///
    /// # Panics
    /// When it is not ready within 30 s, with its log.
    pub async fn start(self) -> PostgresServer {
        self.try_start()
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts the server and waits until it is ready.
    ///
    /// # Errors
    /// When PostgreSQL is not installed, or not ready within 30 s, with its log.
    pub async fn try_start(self) -> io::Result<PostgresServer> {
        let settings = self.clone();
        let directory = spawn_blocking(move || settings.create()).await?;
        let directory = directory.map_err(|error| {
            io::Error::other(format!("no data directory for PostgreSQL: {error}"))
        })?;
        let mut attempts = 20;
        let (port, process) = loop {
            let port = free_port();
            attempts -= 1;
            match self.launch(port, directory.directory()).await {
                Ok(process) => break (port, process),
                // Another process bound the port between our check and the server's.
                Err(Failure::PortTaken(_)) if attempts > 0 => {}
                Err(failure) => return Err(failure.into_error(port)),
            }
        };
        let state = State {
            process: Some(process),
            stopped: false,
        };
        Ok(PostgresServer {
            port,
            settings: self,
            state: Mutex::new(state),
            directory,
        })
    }

    /// A data directory with these settings.
    fn create(&self) -> io::Result<Supervised> {
        let installation = Installation::find()?;
        let directory = match self.primary {
            Some(primary) => installation.new_copy(primary)?,
            None => installation.new_data()?,
        };
        let data = installation.data_of(directory.directory());
        let mut file = OpenOptions::new()
            .append(true)
            .open(data.join("postgresql.conf"))?;
        // Segments of shared memory outlive a server that is killed. Files do not.
        writeln!(file, "dynamic_shared_memory_type = 'mmap'")?;
        writeln!(
            file,
            "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''"
        )?;
        for line in &self.lines {
            writeln!(file, "{line}")?;
        }
        if let Some(Certificates { server, .. }) = &self.certificates {
            writeln!(file, "ssl = on")?;
            installation.write(&data.join("server.crt"), &server.certificate)?;
            installation.write(&data.join("server.key"), &server.key)?;
        }
        if let Some(password) = &self.password {
            let literal = password.replace('\'', "''");
            installation.execute(&data, &format!("alter role postgres password '{literal}'"))?;
            fs::write(
                data.join("pg_hba.conf"),
                "host all all 127.0.0.1/32 scram-sha-256\n",
            )?;
        }
        Ok(directory)
    }

    /// Starts the processes on the data in `directory`, which a failure leaves there.
    pub(super) async fn launch(&self, port: u16, directory: &Path) -> Result<Supervised, Failure> {
        let installation = Installation::find()?;
        let data = installation.data_of(directory);
        let clock = self.clock.iter().flat_map(ServerClock::command);
        let command: Vec<_> = clock.chain(installation.server(&data, port)).collect();
        let process = Supervised::spawn(directory, command.iter().map(String::as_str))?;

        let mut log = process.log();
        let lines = ["connections", "read-only connections"];
        let lines = lines.map(|what| format!("database system is ready to accept {what}"));
        let is_ready = |text: &str| lines.iter().any(|line| text.contains(line));
        let ready = |log: &Log| log.ended || is_ready(&log.text);
        let ready = timeout(PATIENCE, log.wait_for(ready)).await;
        if ready.is_ok_and(|log| log.is_ok_and(|log| !log.ended)) {
            installation.forget_shared_memory(&data)?;
            return Ok(process);
        }
        let text = process.output();
        // Fails where the server has ended itself, and keeps its directory then, too.
        let _ = process.kill_keeping_directory();
        Err(if text.contains("Address already in use") {
            Failure::PortTaken(text)
        } else {
            Failure::Other(text)
        })
    }
}

/// Failure of a start, with the output of the server.
pub(super) enum Failure {
    PortTaken(String),
    Other(String),
}

impl Failure {
    pub(super) fn into_error(self, port: u16) -> io::Error {
        let (Self::PortTaken(log) | Self::Other(log)) = self;
        io::Error::other(format!("PostgreSQL did not start on port {port}:\n{log}"))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Other(error.to_string())
    }
}
