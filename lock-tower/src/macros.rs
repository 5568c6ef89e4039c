//! Macros that are shared by the services of this crate.

/// Defines accessors of the inner service, for a service with a field `inner: S`.
macro_rules! inner_service {
    () => {
        /// Gets a reference to the inner service.
        pub fn get_ref(&self) -> &S {
            &self.inner
        }

        /// Gets a mutable reference to the inner service.
        pub fn get_mut(&mut self) -> &mut S {
            &mut self.inner
        }

        /// Consumes `self`, returning the inner service.
        pub fn into_inner(self) -> S {
            self.inner
        }
    };
}
